"""vLLM's own objects read once at start: its cache tensors, groups and model, as kvferry's records.

What kvferry cannot describe exactly is refused here, by name, before any request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm

from kvferry.engines.vllm.identity import files_digest, fingerprint
from kvferry.engines.vllm.packing import check_packing
from kvferry.engines.vllm.pool_layout import Group, LayerTensor, pool_layout
from kvferry.errors import IncompatibleError
from kvferry.state import Fingerprint, config_digest
from kvferry.transfer import Pool

__all__ = ["describe_model", "describe_pool", "largest_window"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "merges.txt", "tekken.json")


def describe_pool(caches: Mapping[str, torch.Tensor], cache_config: Any, config: Any, rank: int) -> Pool:
    """vLLM's KV memory, not copied, with its layout. Raises IncompatibleError naming what does not fit."""
    tensors = dict(caches)
    _check_host(tensors)
    if config.speculative_config is not None:
        raise _unfit("speculative decoding: the draft's cache and hidden rows are not handed over")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise _unfit("calculate_kv_scales: each server finds scales of its own, unknown to the other")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    if len(storages) != 1:
        raise _unfit(f"kv cache: {len(storages)} allocations, not one")
    (storage,) = storages.values()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    groups = tuple(_group(spec) for spec in cache_config.kv_cache_groups)
    for group in groups:
        _check_tensors(group, {name: tensors[name] for name in group.layers}, cache_config.num_blocks)
        check_packing(
            dtype=config.model_config.dtype,
            block_size=group.block_size,
            head_dim=group.head_dim,
            cache_dtype=config.cache_config.cache_dtype,
        )
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise _unfit(f"kv cache: dtypes {', '.join(sorted(dtypes))} beside each other")
    layout = pool_layout(
        groups,
        {name: _place(tensor) for name, tensor in tensors.items()},
        dtype=dtypes.pop(),
        num_blocks=cache_config.num_blocks,
        nbytes=memory.nbytes,
        first_head=_first_head(config, rank, groups[0].kv_heads),
    )
    return Pool(memory, layout)


def _place(tensor: torch.Tensor) -> LayerTensor:
    base, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    return LayerTensor(tensor.data_ptr() - base, tensor.stride(0) * size, tensor.stride(1) * size)


def _first_head(config: Any, rank: int, kv_heads: int) -> int:
    """The model's number of this rank's first KV head; ranks beyond the heads hold copies."""
    tp, total = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    return int(rank % tp * kv_heads if total >= tp else rank % tp * total // tp)


def largest_window(cache_config: Any) -> int:
    """Tokens that sliding layers keep before the one that is computed; 0 where none slides."""
    windows = [_group(group).window for group in cache_config.kv_cache_groups]
    return max(0, *(window - 1 for window in windows if window is not None), 0)


def _group(group: Any) -> Group:
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if kind not in {"FullAttentionSpec", "SlidingWindowSpec"}:
        raise _unfit(f"kv cache group of {kind}: only full attention and sliding windows are described")
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise _unfit(f"kv cache: heads of {spec.head_size} for K and {spec.head_size_v} for V")
    return Group(
        tuple(group.layer_names),
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.sliding_window if kind == "SlidingWindowSpec" else None,
    )


def _check_host(tensors: Mapping[str, torch.Tensor]) -> None:
    devices = {tensor.device.type for tensor in tensors.values()}
    if devices != {"cpu"}:
        raise _unfit(f"kv cache on {', '.join(sorted(devices))}: kvferry's vLLM connector moves host memory")


def _check_tensors(group: Group, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> None:
    wanted = (num_blocks, group.kv_heads, group.block_size, 2 * group.head_dim)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted or tensor.stride()[2:] != (2 * group.head_dim, 1):
            raise _unfit(
                f"kv cache of {name}: shape {tuple(tensor.shape)} with strides {tensor.stride()},"
                f" not {wanted} with whole tokens"
            )


def _unfit(message: str) -> IncompatibleError:
    return IncompatibleError(
        message,
        phase="start",
        now_true="vLLM does not start",
        next_step="use another KV connector for this model",
    )


def describe_model(config: Any) -> Fingerprint:
    """The identity of the model that vLLM has loaded. Reads at most 64 MiB of the checkpoint."""
    model = config.model_config
    folder = _folder(model.model, model.revision)
    weights = _found(folder, _WEIGHTS)
    if config.load_config.load_format == "dummy":
        identity = config_digest({"load_format": "dummy", "seed": model.seed})
    else:
        identity = files_digest(weights)
    tokenizer = _found(_folder(model.tokenizer, model.tokenizer_revision), _TOKENIZER)
    return fingerprint(
        build=(
            f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        ),
        weights=identity,
        config=json.loads(model.hf_config.to_json_string(use_diff=False)),
        cache={
            "dtype": str(model.dtype),
            "cache_dtype": config.cache_config.cache_dtype,
            "quantization": str(model.quantization),
        },
        tokenizer=files_digest(tokenizer) if tokenizer else config_digest({"tokenizer": "none"}),
        vocab_size=model.get_vocab_size(),
        max_context=model.max_model_len,
    )


def _folder(name: str, revision: str | None) -> Path:
    """A folder as given, a checkpoint file's own folder, or the snapshot that vLLM has downloaded."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names of the hub

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of the first pattern that has any."""
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files
    return []
