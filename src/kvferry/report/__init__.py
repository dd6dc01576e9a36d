"""One page to look at: link files, checks, plans, simulations and demos as charts in a single HTML file."""

from __future__ import annotations

from kvferry.report.inputs import Input, Kind, read_input
from kvferry.report.page import render

__all__ = ["Input", "Kind", "read_input", "render"]
