"""How this build of vLLM packs K and V inside a block, found out by writing a scratch block.

The logical shape of a CPU cache tensor does not say it, and other processors may pack in another
way, so one block is written through vLLM's own operator and looked at.
"""

from __future__ import annotations

from typing import Any

from kvferry.errors import IncompatibleError

__all__ = ["check_packing"]


def check_packing(*, dtype: Any, block_size: int, head_dim: int, cache_dtype: str) -> None:
    """Raise IncompatibleError unless K lies as (element, token) and V as (token, element).

    ``dtype``: the torch dtype of the model. Takes a few milliseconds and a scratch block.
    """
    import torch  # noqa: PLC0415 - heavy, and only where vLLM is
    from vllm import _custom_ops as ops  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    isa = _get_attn_isa(dtype, block_size, head_dim, cache_dtype)
    tokens = block_size
    # Small whole numbers are exact in every dtype down to float8, and neighbours differ.
    number = torch.arange(tokens)[:, None] * 3 + torch.arange(head_dim)[None] * 5
    key, value = (((number + shift) % 13).to(dtype).view(tokens, 1, head_dim) for shift in (0, 7))
    cache = torch.zeros(2, 1, 2 * block_size, head_dim, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(block_size, 2 * block_size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        key, value, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype
    )
    block = cache[1, 0].reshape(2, -1)
    found = (
        torch.equal(block[0], key[:, 0].t().reshape(-1)),
        torch.equal(block[1], value[:, 0].reshape(-1)),
    )
    if found != (True, True):
        raise IncompatibleError(
            f"packing: this vLLM packs K and V for {isa!r}, {dtype}, blocks of {block_size} in a way that"
            " kvferry does not know",
            next_step="use another KV connector on this processor, or another dtype",
        )
