"""How many draft layers a config declares."""

from __future__ import annotations

from kvferry.model.fields import Fields

__all__ = ["draft_count"]

_LAYERS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_transformer_layers",
)


def draft_count(f: Fields) -> int:
    """Draft layers declared: a number of modules times layers in each, or the number of layers."""
    modules = f.optional("num_mtp_modules", minimum=0)
    layers = next((n for name in _LAYERS if (n := f.optional(name, minimum=0)) is not None), None)
    if modules is None and layers is None:
        return 0
    return (1 if modules is None else modules) * (1 if layers is None else layers)
