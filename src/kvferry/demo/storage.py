"""How the demo's two workers store K and V, what lies between them, and what a handoff may then promise."""

from __future__ import annotations

from typing import get_args

from kvferry.demo.records import AxisOrder, DemoOptions, Dtype
from kvferry.errors import InputError
from kvferry.layout import Conversions, WireFormat, convert_dtype, numpy_dtype
from kvferry.state import Exactness

__all__ = ["check_storage", "storage"]


def check_storage(options: DemoOptions) -> None:
    """Raise InputError naming the option, or LocalError where a dtype needs a package that is missing."""
    for field, value, known in (
        ("dtype", options.dtype, get_args(Dtype)),
        ("decode_dtype", options.decode_dtype or options.dtype, get_args(Dtype)),
        ("axis_order", options.axis_order, get_args(AxisOrder)),
        ("decode_axis_order", options.decode_axis_order or options.axis_order, get_args(AxisOrder)),
        ("wire_format", options.wire_format, (None, *WireFormat)),
    ):
        if value not in known:
            raise InputError(f"{field}: {value!r} is not one of {', '.join(filter(None, known))}")
        if value in get_args(Dtype):
            numpy_dtype(value)
    if options.num_drafts and (options.decode_dtype or options.dtype) != options.dtype:
        raise InputError("speculative: the demo hands drafts over between workers of one dtype only")


def storage(options: DemoOptions) -> tuple[Exactness, Conversions | None]:
    """What the handoff may do to values, and what it may then promise."""
    decode_order = options.decode_axis_order or options.axis_order
    same_dtype = options.dtype == (options.decode_dtype or options.dtype)
    same_form = options.axis_order.endswith("transposed") is decode_order.endswith("transposed")
    if same_dtype and same_form and options.wire_format is None:
        return Exactness.BITS, None
    wire = None if options.wire_format is None else WireFormat(options.wire_format)
    conversions = Conversions(lossy=options.allow_lossy, wire=wire)
    if wire is not None:
        return Exactness.BEST_EFFORT, conversions
    if same_dtype:
        return Exactness.BITS, conversions
    bound = convert_dtype(options.dtype, options.decode_dtype or options.dtype)
    is_exact = bound is not None and bound.is_exact
    rounds = options.allow_lossy and not is_exact
    return Exactness.BEST_EFFORT if rounds else Exactness.TOKENS, conversions
