"""Layouts of KV pools, and the plan that copies a request from one layout into another."""

from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import ITEMSIZE, LayerKind, Role

__all__ = ["ITEMSIZE", "BlockTable", "GroupLayout", "LayerKind", "PoolLayout", "Role", "TensorLayout"]
