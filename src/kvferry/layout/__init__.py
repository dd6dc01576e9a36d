"""Layouts of KV pools, and the plan that copies a request from one layout into another."""

from kvferry.layout.clusters import CHUNK_NBYTES, chunk_name
from kvferry.layout.match import mismatches
from kvferry.layout.pieces import MAX_PIECES
from kvferry.layout.plan import CopyPlan, PieceTable, copy_plan, source_pieces
from kvferry.layout.product import StridedPlan
from kvferry.layout.ranks import RankMove, rank_plan
from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import ITEMSIZE, LayerKind, Role

__all__ = [
    "CHUNK_NBYTES",
    "ITEMSIZE",
    "MAX_PIECES",
    "BlockTable",
    "CopyPlan",
    "GroupLayout",
    "LayerKind",
    "PieceTable",
    "PoolLayout",
    "RankMove",
    "Role",
    "StridedPlan",
    "TensorLayout",
    "chunk_name",
    "copy_plan",
    "mismatches",
    "rank_plan",
    "source_pieces",
]
