"""Links between nodes: measured samples, the fit that predicts from them, and the files that hold them."""

from kvferry.link.presets import PRESETS, LinkPreset, link_preset
from kvferry.link.profile import ConditionFit, LinkFile, LinkProfile, Node, Registration
from kvferry.link.records import Knee, Line, LinkFit, Sample, Span, Spread
from kvferry.link.words import Conditions, Mode

__all__ = [
    "PRESETS",
    "ConditionFit",
    "Conditions",
    "Knee",
    "Line",
    "LinkFile",
    "LinkFit",
    "LinkPreset",
    "LinkProfile",
    "Mode",
    "Node",
    "Registration",
    "Sample",
    "Span",
    "Spread",
    "link_preset",
]
