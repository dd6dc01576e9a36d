"""Links between nodes: measured samples, the fit that predicts from them, and the files that hold them."""

from kvferry.link.copies import Copy, Shape, common_copies
from kvferry.link.diff import Change, Drift, LinkDiff, Verdict, diff_links
from kvferry.link.fit import fit_link
from kvferry.link.load import MAX_LINKS_NBYTES, decode_links, encode_links, load_links
from kvferry.link.merge import How, Merged, merge_links
from kvferry.link.outliers import Outlier, Reason, find_outliers
from kvferry.link.presets import PRESETS, LinkPreset, PublishedFigure, link_preset, preset_links
from kvferry.link.profile import ConditionFit, LinkFile, LinkProfile, Node, Registration
from kvferry.link.records import FAR, Knee, Line, LinkFit, Sample, Span, Spread, samples_needed
from kvferry.link.summary import PairSummary, summarise
from kvferry.link.words import Conditions, Mode

__all__ = [
    "FAR",
    "MAX_LINKS_NBYTES",
    "PRESETS",
    "Change",
    "ConditionFit",
    "Conditions",
    "Copy",
    "Drift",
    "How",
    "Knee",
    "Line",
    "LinkDiff",
    "LinkFile",
    "LinkFit",
    "LinkPreset",
    "LinkProfile",
    "Merged",
    "Mode",
    "Node",
    "Outlier",
    "PairSummary",
    "PublishedFigure",
    "Reason",
    "Registration",
    "Sample",
    "Shape",
    "Span",
    "Spread",
    "Verdict",
    "common_copies",
    "decode_links",
    "diff_links",
    "encode_links",
    "find_outliers",
    "fit_link",
    "link_preset",
    "load_links",
    "merge_links",
    "preset_links",
    "samples_needed",
    "summarise",
]
