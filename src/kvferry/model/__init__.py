"""Model configs as layer groups: what each family keeps per request."""

from __future__ import annotations

from kvferry.model.draft import with_draft
from kvferry.model.registry import FAMILIES
from kvferry.model.shape import CacheTensor, Growth, LayerGroup, LayerKind, ModelShape, TensorRole
from kvferry.model.source import load_shape

__all__ = [
    "FAMILIES",
    "CacheTensor",
    "Growth",
    "LayerGroup",
    "LayerKind",
    "ModelShape",
    "TensorRole",
    "load_shape",
    "with_draft",
]
