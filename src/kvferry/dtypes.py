"""How many bytes a row of values takes in each KV cache dtype, scales included.

A row is what one token stores for one head on one side (K or V), or one latent vector.
Most dtypes pack values in groups: ``group_values`` values take ``group_nbytes`` bytes, scales
inside the group counted; some add a scale per row. Scales kept once per layer count nothing.

Sources: vLLM 0.33.0 (``triton_attn.py`` for the per-token-head scales,
``nvfp4_kv_cache_full_dim`` for nvfp4, ``v1/attention/backends/mla`` for the indexer rows),
OCP MX 1.0 for mxfp4, ggml ``block_q*`` (``GGML_QUANT_SIZES`` of the gguf package) for the rest.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import msgspec

from kvferry.errors import InputError, did_you_mean

__all__ = [
    "ALIASES",
    "DTYPES",
    "SCALE_NBYTES",
    "WIRE_FORMATS",
    "DtypeClass",
    "KVDtype",
    "dtype_named",
    "float_named",
]


class DtypeClass(StrEnum):
    """What a dtype is, which decides which kind of cache can hold it."""

    FLOAT = "float"
    BYTE = "one byte, scale per tensor"
    ROW_SCALED = "scale per token and head"
    GROUP_SCALED = "scale per group, floating point"
    GGML = "ggml block"
    MLA_PACKED = "packed MLA row"
    INDEXER = "DSA indexer row"


class KVDtype(msgspec.Struct, frozen=True):
    """One dtype of the table.

    ``group_values`` values take ``group_nbytes`` bytes; each row adds ``row_nbytes``. A packed
    MLA dtype has no rule of its own: the cache tensor that allows it states its row.
    """

    name: str
    dtype_class: DtypeClass
    group_values: int = 1
    group_nbytes: int = 1
    row_nbytes: int = 0


_ALL = (
    KVDtype("fp32", DtypeClass.FLOAT, 1, 4),
    KVDtype("fp16", DtypeClass.FLOAT, 1, 2),
    KVDtype("bf16", DtypeClass.FLOAT, 1, 2),
    KVDtype("fp8_e4m3", DtypeClass.BYTE),
    KVDtype("fp8_e5m2", DtypeClass.BYTE),
    KVDtype("int8", DtypeClass.BYTE),
    KVDtype("fp8_per_token_head", DtypeClass.ROW_SCALED, 1, 1, 4),
    KVDtype("int8_per_token_head", DtypeClass.ROW_SCALED, 1, 1, 4),
    KVDtype("int4_per_token_head", DtypeClass.ROW_SCALED, 2, 1, 4),
    KVDtype("nvfp4", DtypeClass.GROUP_SCALED, 16, 9),
    KVDtype("mxfp4", DtypeClass.GROUP_SCALED, 32, 17),
    KVDtype("fp8_group128", DtypeClass.INDEXER, 128, 132),
    KVDtype("q8_0", DtypeClass.GGML, 32, 34),
    KVDtype("q5_1", DtypeClass.GGML, 32, 24),
    KVDtype("q5_0", DtypeClass.GGML, 32, 22),
    KVDtype("q4_1", DtypeClass.GGML, 32, 20),
    KVDtype("q4_0", DtypeClass.GGML, 32, 18),
    KVDtype("iq4_nl", DtypeClass.GGML, 32, 18),
    KVDtype("fp8_ds_mla", DtypeClass.MLA_PACKED),
    KVDtype("nvfp4_ds_mla", DtypeClass.MLA_PACKED),
)
DTYPES: dict[str, KVDtype] = {dtype.name: dtype for dtype in _ALL}

# Forms that floating-point K and V may cross the wire in: a byte a value, a scale for each (block, head).
WIRE_FORMATS = ("float8_e4m3fn", "int8")
SCALE_NBYTES = 4

ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


@lru_cache(maxsize=256)
def dtype_named(name: str, field: str = "kv_dtype") -> KVDtype:
    """The dtype of that name or alias (``"bf16"``, ``"torch.bfloat16"``).

    Raises InputError, which names ``field`` and lists the known dtypes.
    """
    if not isinstance(name, str):
        raise InputError(f"{field}: {name!r} is not the name of a dtype")
    key = name.strip().lower().removeprefix("torch.")
    dtype = DTYPES.get(ALIASES.get(key, key))
    if dtype is None:
        known = f"known: {', '.join(DTYPES)}{did_you_mean(name.lower(), DTYPES)}"
        raise InputError(f"{field}: {name[:60]!r} is not a known dtype; {known}")
    return dtype


def float_named(name: str, field: str) -> KVDtype:
    """The dtype of that name, which must be a plain floating-point one.

    Raises InputError, which names ``field`` and lists those dtypes.
    """
    dtype = dtype_named(name, field)
    if dtype.dtype_class is not DtypeClass.FLOAT:
        floats = [entry.name for entry in _ALL if entry.dtype_class is DtypeClass.FLOAT]
        raise InputError(f"{field}: {name!r} is not one of {', '.join(floats)}")
    return dtype
