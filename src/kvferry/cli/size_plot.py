"""``kvferry size --plot``: bytes over tokens, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.size_table import short_names
from kvferry.errors import InputError
from kvferry.size import MAX_TOKENS
from kvferry.units import format_bytes

if TYPE_CHECKING:
    from kvferry.cli.size import SizeOptions
    from kvferry.model import ModelShape
    from kvferry.size import KVSize

__all__ = ["curve", "draw", "token_counts", "window_tokens"]

_POINTS_PER_DOUBLING = 8
_MIN_LAST_TOKENS = 2**17


def token_counts(asked: int) -> list[int]:
    """Where to draw: from 1 to twice the tokens asked about, or to 131,072; rising, without repeats."""
    last = min(max(2 * asked, _MIN_LAST_TOKENS), MAX_TOKENS)
    steps = range(last.bit_length() * _POINTS_PER_DOUBLING + 1)
    counts = {round(2 ** (step / _POINTS_PER_DOUBLING)) for step in steps}
    return sorted({count for count in counts if count <= last} | {asked, last})


def curve(shape: ModelShape, options: SizeOptions, counts: Sequence[int]) -> list[KVSize]:
    """The sizes at those token counts, with nothing cached."""
    return [options.size_of(shape, count) for count in counts]


def window_tokens(shape: ModelShape, last: int) -> list[int]:
    """Windows and chunks of the model that fill up within the picture."""
    return sorted({group.limit_tokens for group in shape.groups if 0 < group.limit_tokens <= last})


def draw(path: Path, models: Sequence[str], shapes: Sequence[ModelShape], options: SizeOptions) -> None:
    """Write the picture: total bytes per model, its constant part dashed, a dot where a window fills.

    Raises InputError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plot: needs matplotlib; pip install 'kvferry[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    counts = token_counts(options.tokens)
    for model, shape in zip(short_names(models), shapes, strict=True):
        sizes = curve(shape, options, counts)
        totals = [size.logical_bytes for size in sizes]
        (line,) = axes.plot(counts, totals, label=model)
        constant = sizes[0].constant_bytes  # what is there at the first token and never grows
        if constant:
            label = f"{model}: constant {format_bytes(constant)}"
            axes.plot(counts, [constant] * len(counts), "--", color=line.get_color(), label=label)
        windows = window_tokens(shape, counts[-1])
        heights = [options.size_of(shape, window).logical_bytes for window in windows]
        axes.plot(windows, heights, "o", color=line.get_color())
    axes.axvline(options.tokens, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes, one copy (logical)")
    axes.set_title("state of one request; dots: a window is full; dashed: constant part", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"plot: cannot write {path}: {error}") from error
