"""Model, cluster, plan and batch in; memory, time and cost out. Needs neither torch nor a GPU."""

from utils.planner.adapters import Lora
from utils.planner.cluster import Cluster, network
from utils.planner.frameworks import FRAMEWORKS, Framework, framework
from utils.planner.layout import Batch, Plan
from utils.planner.memory import StageMemory, memory, worst

__all__ = [
    "FRAMEWORKS",
    "Batch",
    "Cluster",
    "Framework",
    "Lora",
    "Plan",
    "StageMemory",
    "framework",
    "memory",
    "network",
    "worst",
]
