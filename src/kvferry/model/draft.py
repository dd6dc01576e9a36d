"""The draft model's own cache: MTP modules and EAGLE heads keep KV of their own."""

from __future__ import annotations

import msgspec

from kvferry.errors import InputError
from kvferry.model.shape import LayerGroup, ModelShape
from kvferry.model.source import load_shape

__all__ = ["with_draft"]

MAX_DRAFT_LAYERS = 1000


def with_draft(shape: ModelShape, draft: str, num_layers: int | None = None) -> ModelShape:
    """The shape with the draft's groups added.

    Args:
        draft: ``mtp`` (the layers that the config declares), ``eagle`` (one layer like the target's
            last attention layer unless ``num_layers`` says more), or the draft model's own config
            (a file, a folder, ``shape:...``).
        num_layers: how many draft layers hold a cache; not for a draft with its own config.

    Raises InputError for ``mtp`` on a model that declares no such layers.
    """
    if not isinstance(draft, str):
        raise InputError(f"draft: {draft!r} is neither mtp, eagle, nor the name of a config")
    if draft not in {"mtp", "eagle"}:
        return _own_config(shape, draft, num_layers)
    if not shape.draft_layer:
        raise InputError(f"draft: {shape.model_type} has no attention layer to take the draft's shape from")
    declared = shape.num_draft_layers if draft == "mtp" else 1
    if num_layers is not None and num_layers < 1:
        raise InputError(f"draft_layers: {num_layers} is less than 1")
    count = declared if num_layers is None else num_layers
    if count < 1:
        raise InputError(
            f"draft: {shape.model_type} declares no MTP layers in its config; give --draft-layers"
        )
    if count > MAX_DRAFT_LAYERS:
        raise InputError(f"draft_layers: {count} is more than {MAX_DRAFT_LAYERS}")
    layers = tuple(range(shape.num_layers, shape.num_layers + count))
    groups = tuple(
        _as_draft(group, tuple(layer for layer in layers for _ in group.layers))
        for group in shape.draft_layer
    )
    warnings = shape.warnings
    if draft == "eagle":
        warnings += ("draft eagle: counted like the target's last attention layer; its own config is exact",)
    return msgspec.structs.replace(shape, groups=shape.groups + groups, warnings=warnings)


def _own_config(shape: ModelShape, draft: str, num_layers: int | None) -> ModelShape:
    if num_layers is not None:
        raise InputError("draft_layers: the draft's own config says how many layers it has")
    own = load_shape(draft, "draft")
    groups = tuple(
        msgspec.structs.replace(
            _as_draft(group, tuple(shape.num_layers + layer for layer in group.layers)), dtype=own.dtype
        )
        for group in own.groups
    )
    warnings = shape.warnings + tuple(f"draft: {warning}" for warning in own.warnings)
    if own.dtype is None:
        warnings += ("draft: no dtype in its config; counted in the target's unless one is asked for",)
    return msgspec.structs.replace(shape, groups=shape.groups + groups, warnings=warnings)


def _as_draft(group: LayerGroup, layers: tuple[int, ...]) -> LayerGroup:
    return msgspec.structs.replace(group, layers=layers, is_draft=True)
