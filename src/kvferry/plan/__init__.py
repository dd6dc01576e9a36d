"""Does the move pay, where, and with how many workers: pure functions over measured numbers."""

from __future__ import annotations

from kvferry.plan.check import Answer, Binding, Split, Verdict, answer
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw, PrefillTable
from kvferry.plan.compute_file import ProfileChoice, parse_profile
from kvferry.plan.explain import Equation, explain_check
from kvferry.plan.flips import Flip, flips
from kvferry.plan.handoff import Overlap, Way, exposed_seconds, link_time
from kvferry.plan.payload import Payload, PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise
from kvferry.plan.public_profiles import PUBLIC_PROFILES, public_profile
from kvferry.plan.trace import TraceRow, read_trace

__all__ = [
    "PUBLIC_PROFILES",
    "Answer",
    "Binding",
    "ComputeProfile",
    "DecodeLaw",
    "Equation",
    "FirstToken",
    "Flip",
    "GivenPrefill",
    "Overlap",
    "Payload",
    "PayloadTable",
    "PoolFormat",
    "PrefillLaw",
    "PrefillTable",
    "ProfileChoice",
    "Promise",
    "Split",
    "TraceRow",
    "Verdict",
    "Way",
    "answer",
    "explain_check",
    "exposed_seconds",
    "flips",
    "link_time",
    "parse_profile",
    "public_profile",
    "read_trace",
]
