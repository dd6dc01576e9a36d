"""Does the move pay, where, and with how many workers: pure functions over measured numbers."""

from __future__ import annotations

from kvferry.plan.check import Answer, Binding, Split, Verdict, answer
from kvferry.plan.choose import PlanResult, make_plan
from kvferry.plan.cluster import Cluster, build_cluster
from kvferry.plan.cluster_file import parse_cluster
from kvferry.plan.cluster_tables import ClusterFile
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw, PrefillTable
from kvferry.plan.compute_file import ProfileChoice, parse_profile
from kvferry.plan.explain import Equation, explain_check
from kvferry.plan.explain_plan import explain_plan
from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role, Spot
from kvferry.plan.handoff import Overlap, Way, exposed_seconds, link_time
from kvferry.plan.judge import PlanOptions, PlanRow
from kvferry.plan.payload import Payload, PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise
from kvferry.plan.public_profiles import PUBLIC_PROFILES, public_profile
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.sim_request import RequestRecord
from kvferry.plan.sim_result import Result
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import TraceRow, read_trace

# The functions ``simulate`` and ``flips`` are in their modules of the same names.
__all__ = [
    "PUBLIC_PROFILES",
    "Answer",
    "Binding",
    "Cluster",
    "ClusterFile",
    "ComputeProfile",
    "DecodeLaw",
    "EngineRules",
    "Equation",
    "FirstToken",
    "Fleet",
    "GivenPrefill",
    "Instance",
    "Overlap",
    "Payload",
    "PayloadTable",
    "PlanOptions",
    "PlanResult",
    "PlanRow",
    "Policy",
    "PoolFormat",
    "PrefillLaw",
    "PrefillTable",
    "ProfileChoice",
    "Promise",
    "RequestRecord",
    "Result",
    "Role",
    "Split",
    "Spot",
    "Targets",
    "TierCost",
    "TraceRow",
    "Verdict",
    "Way",
    "answer",
    "build_cluster",
    "explain_check",
    "explain_plan",
    "exposed_seconds",
    "link_time",
    "make_plan",
    "parse_cluster",
    "parse_profile",
    "public_profile",
    "read_trace",
]
