"""From what a person has (a config, its file or folder, a shape by hand) to a ModelShape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry.dtypes import dtype_named
from kvferry.errors import InputError
from kvferry.model.families.full import plain
from kvferry.model.fields import MAX_COUNT, Fields
from kvferry.model.registry import FAMILIES, FamilyShape, Heads, heads_group
from kvferry.model.shape import LayerGroup, LayerKind, ModelShape
from kvferry.model.unknown import check_unread, suspicious_fields

__all__ = ["TEXT_CONFIGS", "WRAPPERS", "load_shape", "shape_by_hand", "shape_from_config"]

MAX_CONFIG_NBYTES = 16 * 2**20
"""A config.json is a few KiB; more than this is some other file."""

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Names under which a wrapper keeps its language model; only that part holds KV."""

WRAPPERS = frozenset(
    (
        *(
            "aria",
            "aya_vision",
            "cohere2_vision",
            "deepseek_vl",
            "deepseek_vl_v2",
            "gemma3",
            "gemma3n",
            "gemma4",
        ),
        *("gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "granite_speech", "idefics3", "internvl"),
        *(
            "internvl_chat",
            "kimi_k25",
            "kimi_k3",
            "kimi_vl",
            "llama4",
            "llava",
            "llava_next",
            "llava_next_video",
        ),
        *("llava_onevision", "lfm2_vl", "mistral3", "mllama", "paligemma", "pixtral", "qwen2_5_omni"),
        *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "ultravox"),
        *("video_llava", "vipllava", "voxtral"),
    )
)
"""Wrapper types whose other parts (vision and audio towers) are known to hold no KV."""

# Names of the draft layers that a config declares; a count of modules times layers in each.
_DRAFT_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_transformer_layers",
)
_SHAPE = re.compile(r"shape:([0-9]+)x([0-9]+)x([0-9]+)")


def load_shape(model: str) -> ModelShape:
    """The shape of ``model``: a ``config.json``, a folder with one, or ``shape:LAYERSxKV_HEADSxHEAD_DIM``.

    Raises InputError, one line, for a path that is not there and a file that is no config.
    """
    if model.startswith("shape:"):
        return shape_by_hand(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_NBYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"model: {path}: {reason}") from error
    return shape_from_config(_parse(path, data))


def _parse(path: Path, data: bytes) -> Mapping[str, object]:
    if not data.strip():
        raise InputError(f"model: {path} is empty")
    if len(data) > MAX_CONFIG_NBYTES:
        raise InputError(f"model: {path} has more than {MAX_CONFIG_NBYTES} bytes; that is no config.json")
    try:
        # The standard library's reader, because published configs hold Infinity (time_step_limit).
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"model: {path} holds a JSON {type(config).__name__}, not an object")
    return config


def shape_by_hand(model: str) -> ModelShape:
    """``shape:80x8x128``: full attention in 80 layers, 8 KV heads of width 128, fp16 by default."""
    match = _SHAPE.fullmatch(model)
    if match is None:
        raise InputError(
            f"model: {model!r} is not shape:LAYERSxKV_HEADSxHEAD_DIM, for example shape:80x8x128"
        )
    layers, kv_heads, width = (int(number[:20]) for number in match.groups())
    if min(layers, kv_heads, width) < 1 or max(layers, kv_heads, width) > MAX_COUNT:
        raise InputError(f"model: {model!r}: each number must be from 1 to {MAX_COUNT}")
    group = heads_group(LayerKind.FULL, range(layers), Heads(kv_heads, width, width))
    return ModelShape("shape", layers, (group,), dtype="fp16", draft_layer=_one_draft_layer((group,)))


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """See :meth:`kvferry.model.ModelShape.from_config`."""
    outer = Fields(config)
    f, model_type = _language_part(outer)
    function = FAMILIES.get(model_type)
    if function is None:
        result = _unknown(f, model_type)
    else:
        result = function(f)
        check_unread(f, result.groups)
    groups = tuple(group for group in result.groups if group.layers)
    if not groups:
        raise f.error("num_hidden_layers", "no layer of this model owns a cache")
    _note_quantised_cache(outer)
    if f.defaults:
        f.notes.append(f"not in the config, taken from the model class: {', '.join(f.defaults)}")
    draft = result.draft_layer or _one_draft_layer(groups)
    return ModelShape(
        model_type=outer.text("model_type") or model_type or "unknown",
        num_layers=result.num_layers,
        groups=groups,
        dtype=_own_dtype(f, outer),
        draft_layer=draft,
        num_draft_layers=_draft_count(f, outer),
        encoder_tokens=result.encoder_tokens,
        vocab_size=f.optional("vocab_size") or outer.optional("vocab_size"),
        warnings=tuple(dict.fromkeys(f.notes)),
    )


def _language_part(outer: Fields) -> tuple[Fields, str]:
    """The innermost text config and its model type; notes an unknown wrapper around a known model."""
    f = outer
    model_type = f.text("model_type") or ""
    while True:
        name = next((name for name in TEXT_CONFIGS if f.has(name)), None)
        inner = f.nested(name) if name is not None else None
        if inner is None:
            return f, model_type
        inner_type = inner.text("model_type") or f"{model_type}_text"
        if inner_type not in FAMILIES and model_type in FAMILIES:
            inner_type = model_type
        if model_type not in WRAPPERS:
            f.notes.append(
                f"model_type {model_type!r} is not a known wrapper; sized from its {name} "
                f"({inner_type}), assuming that its other parts hold no KV"
            )
        f, model_type = inner, inner_type


def _unknown(f: Fields, model_type: str) -> FamilyShape:
    """An unknown model with the plain fields only: full attention, said aloud; with others: refused."""
    label = f"unknown model_type {model_type!r}" if model_type else "no model_type"
    result = plain(f)
    names = suspicious_fields(f)
    if names:
        raise f.error(
            "model_type" if model_type else names[0],
            f"{label}, and its fields {', '.join(names)} suggest a cache that is not plain attention; "
            "give the shape by hand (shape:LAYERSxKV_HEADSxHEAD_DIM) if it is",
        )
    f.notes.append(f"{label}: assumed full attention with K and V of every KV head in every layer")
    return result


def _own_dtype(f: Fields, outer: Fields) -> str | None:
    for fields in (f, outer):
        for name in ("dtype", "torch_dtype"):
            value = fields.text(name)
            if value is not None and value != "auto":
                return dtype_named(value, fields.path + name).name
    return None


def _draft_count(f: Fields, outer: Fields) -> int:
    for fields in (f, outer):
        modules = fields.optional("num_mtp_modules", minimum=0)
        layers = fields.optional(*_DRAFT_COUNTS, minimum=0)
        if modules is not None or layers is not None:
            return (1 if modules is None else modules) * (1 if layers is None else layers)
    return 0


def _one_draft_layer(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """The attention groups of the last layer that has full attention, else of the last with any."""
    kinds = {LayerKind.FULL, LayerKind.MLA}
    attention_groups = [
        group for group in groups if group.kind in kinds | {LayerKind.INDEXER, LayerKind.WINDOW}
    ]
    candidates = [group for group in attention_groups if group.kind in kinds] or attention_groups
    if not candidates:
        return ()
    last = max(group.layers[-1] for group in candidates)
    one = [group for group in attention_groups if last in group.layers]
    return tuple(msgspec.structs.replace(group, layers=(0,)) for group in one)


def _note_quantised_cache(outer: Fields) -> None:
    """Checkpoints that ask for a quantised KV cache: the config's dtype is then not what engines store."""
    quantisation = outer.raw.get("quantization_config")
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, dict) else None
    if scheme:
        outer.notes.append(
            "quantization_config.kv_cache_scheme asks for a quantised KV cache; say which with --kv-dtype"
        )
