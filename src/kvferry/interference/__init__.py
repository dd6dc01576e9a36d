"""What prefill costs the requests beside it, measured on a running server: both sides of "does it pay"."""

from __future__ import annotations

from kvferry.interference.options import InterferenceOptions, check_options, measured_lengths
from kvferry.interference.result import Measured, profile_object
from kvferry.interference.run import OnProgress, measure

__all__ = [
    "InterferenceOptions",
    "Measured",
    "OnProgress",
    "check_options",
    "measure",
    "measured_lengths",
    "profile_object",
]
