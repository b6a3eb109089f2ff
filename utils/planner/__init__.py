"""Model, cluster, plan and batch in; memory, time and cost out. Needs neither torch nor a GPU."""

from utils.checked import check_public
from utils.planner.adapters import Lora
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster, network
from utils.planner.conventions import Framework
from utils.planner.exporters import Export, export
from utils.planner.frameworks import FRAMEWORKS, framework
from utils.planner.goodput import FailureRate, Goodput, goodput
from utils.planner.layout import Plan
from utils.planner.neighbours import (
    Neighbour,
    explain,
    one_change_that_fits,
    why_it_does_not_fit,
)
from utils.planner.plan_estimate import Estimate, estimate
from utils.planner.plan_search import SearchResult, SearchSpace, candidates, search
from utils.planner.plan_search.compare import compare_plans, plan_name
from utils.planner.run_cost import Cost, Storage, cost
from utils.planner.stage_bytes import memory
from utils.planner.stage_bytes.stage_memory import StageMemory, worst
from utils.planner.step_seconds import StepTime, step_time
from utils.planner.traffic import axis_bytes, ring_bytes

__all__ = [
    "FRAMEWORKS",
    "Batch",
    "Cluster",
    "Cost",
    "Estimate",
    "Export",
    "FailureRate",
    "Framework",
    "Goodput",
    "Lora",
    "Neighbour",
    "Plan",
    "SearchResult",
    "SearchSpace",
    "StageMemory",
    "StepTime",
    "Storage",
    "axis_bytes",
    "candidates",
    "compare_plans",
    "cost",
    "estimate",
    "explain",
    "export",
    "framework",
    "goodput",
    "memory",
    "network",
    "one_change_that_fits",
    "plan_name",
    "ring_bytes",
    "search",
    "step_time",
    "why_it_does_not_fit",
    "worst",
]

check_public(globals(), but=("Estimate", "SearchResult", "StageMemory", "StepTime"))
