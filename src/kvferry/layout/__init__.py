"""Layouts of KV pools, and the plan that copies a request from one layout into another."""

from kvferry.layout.clusters import CHUNK_NBYTES, chunk_name
from kvferry.layout.conversion import Conversion, Conversions, ErrorBound, WireFormat, convert_dtype
from kvferry.layout.match import mismatches
from kvferry.layout.pack import numpy_dtype, pack, unpack
from kvferry.layout.pieces import MAX_PIECES
from kvferry.layout.plan import CopyPlan, PieceTable, check_tables, copy_plan, source_pieces
from kvferry.layout.product import StridedPlan
from kvferry.layout.ranks import RankMove, rank_plan
from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout
from kvferry.layout.route import Selection
from kvferry.layout.segments import Extent
from kvferry.layout.tables import BlockTable
from kvferry.layout.wire import (
    Segment,
    Side,
    Window,
    WireTensor,
    cut_windows,
    least_window_nbytes,
    wire_form,
    wire_nbytes,
)
from kvferry.layout.words import ITEMSIZE, LayerKind, Role

__all__ = [
    "CHUNK_NBYTES",
    "ITEMSIZE",
    "MAX_PIECES",
    "BlockTable",
    "Conversion",
    "Conversions",
    "CopyPlan",
    "ErrorBound",
    "Extent",
    "GroupLayout",
    "LayerKind",
    "PieceTable",
    "PoolLayout",
    "RankMove",
    "Role",
    "Segment",
    "Selection",
    "Side",
    "StridedPlan",
    "TensorLayout",
    "Window",
    "WireFormat",
    "WireTensor",
    "check_tables",
    "chunk_name",
    "convert_dtype",
    "copy_plan",
    "cut_windows",
    "least_window_nbytes",
    "mismatches",
    "numpy_dtype",
    "pack",
    "rank_plan",
    "source_pieces",
    "unpack",
    "wire_form",
    "wire_nbytes",
]
