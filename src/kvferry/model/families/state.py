"""What recurrent families share: the convolution's rows and the dtype of the state.

A recurrent layer keeps the last K-1 inputs of its convolution, in the model's dtype, and one
state, whose dtype the config names (``mamba_ssm_dtype``) or the family has a rule for. Both are
constant in the number of tokens. Shapes: vLLM 0.33.0, ``mamba_utils.py``.
"""

from __future__ import annotations

from kvferry.dtypes import float_named
from kvferry.model.fields import Fields
from kvferry.model.shape import CacheTensor, TensorRole

__all__ = ["ARITHMETIC", "conv_tensor", "state_tensor"]

_DTYPE_KEYS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

ARITHMETIC = (
    "chunk_size",
    "mamba_chunk_size",
    "mamba_dt_rank",
    "mamba_expand",
    "mamba_hidden_act",
    "mamba_norm_before_gate",
    "mamba_rms_norm",
    "mamba_use_mlp",
    "ssm_multipliers",
    "use_mamba_kernels",
    "use_mambapy",
)
"""Fields of how a state is computed, not of how large it is."""


def conv_tensor(heads: int, width: int, kernel: int, is_replicable: bool = False) -> CacheTensor:
    """The convolution's last ``kernel - 1`` inputs, ``heads * width`` wide."""
    return CacheTensor(TensorRole.CONV, heads, width * (kernel - 1), is_replicable=is_replicable)


def state_tensor(f: Fields, heads: int, width: int, rule: str | None) -> CacheTensor:
    """The recurrent state, ``heads * width`` values, in the dtype of the config's key, else of the ``rule``.

    ``rule`` None is the model's dtype. That a rule was used is noted. Raises InputError for a
    dtype that is no plain floating-point one: no engine has a layout for another.
    """
    f.understands(*ARITHMETIC)
    name, _ = f.get(*_DTYPE_KEYS)
    dtype = f.text(*_DTYPE_KEYS)
    if dtype is None or dtype == "auto":
        dtype = rule
        counted = "the model's dtype" if rule is None else rule
        f.notes.append(f"{f.path}mamba_ssm_dtype: not in the config; recurrent state counted in {counted}")
    else:
        dtype = float_named(dtype, f.path + name).name
    return CacheTensor(TensorRole.STATE, heads, width, dtype, is_replicable=False)
