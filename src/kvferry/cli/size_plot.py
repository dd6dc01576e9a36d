"""``kvferry size --plot``: bytes over tokens, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.cli.output import Picture
from kvferry.size import MAX_TOKENS
from kvferry.units import format_bytes

if TYPE_CHECKING:
    from kvferry.cli.size_models import SizedModel
    from kvferry.model import ModelShape
    from kvferry.size import KVSize

__all__ = ["curve", "draw", "token_counts", "window_dots"]

_POINTS_PER_DOUBLING = 8
_MIN_LAST_TOKENS = 2**17


def token_counts(asked: int) -> list[int]:
    """Where to draw: from 1 to twice the tokens asked about, or to 131,072; rising, without repeats."""
    last = min(max(2 * asked, _MIN_LAST_TOKENS), MAX_TOKENS)
    steps = range(last.bit_length() * _POINTS_PER_DOUBLING + 1)
    counts = {round(2 ** (step / _POINTS_PER_DOUBLING)) for step in steps}
    return sorted({count for count in counts if count <= last} | {asked, last})


def curve(entry: SizedModel, counts: Sequence[int]) -> list[KVSize]:
    """The sizes at those token counts, with nothing cached."""
    return [entry.options.size_of(entry.shape, count) for count in counts]


def window_dots(entry: SizedModel, last: int) -> tuple[list[int], list[int]]:
    """Where windows and chunks of the model fill up within the picture, and the bytes there."""
    windows = _window_tokens(entry.shape, last)
    return windows, [size.logical_bytes for size in curve(entry, windows)]


def _window_tokens(shape: ModelShape, last: int) -> list[int]:
    return sorted({group.limit_tokens for group in shape.groups if 0 < group.limit_tokens <= last})


def draw(picture: Picture, sized: Sequence[SizedModel]) -> None:
    """Write the picture: total bytes per model, its constant part dashed, a dot where a window fills.

    Raises InputError where the file cannot be written.
    """
    figure = picture.figure(8, 5)
    axes = figure.add_subplot()
    tokens = sized[0].options.tokens
    counts = token_counts(tokens)
    for entry in sized:
        name = entry.name.replace("$", r"\$")  # else matplotlib reads it as a formula
        sizes = curve(entry, counts)
        totals = [size.logical_bytes for size in sizes]
        (line,) = axes.plot(counts, totals, label=name)
        constant = sizes[0].constant_bytes  # what is there at the first token and never grows
        if constant:
            label = f"{name}: constant {format_bytes(constant)}"
            axes.plot(counts, [constant] * len(counts), "--", color=line.get_color(), label=label)
        axes.plot(*window_dots(entry, counts[-1]), "o", color=line.get_color())
    axes.axvline(tokens, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes, one copy (logical)")
    axes.set_title("state of one request; dots: a window is full; dashed: constant part", fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    picture.save(figure)
