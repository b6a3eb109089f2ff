"""The meter: allocation events, their timeline, and the peak by category."""

from utils.checked import check_public
from utils.memory.budgets import Budget, OverBudgetError, budget
from utils.memory.events import Allocation, AllocationEvent, Category, Phase
from utils.memory.holdings import ReachableStorage, reachable_storages
from utils.memory.host import host_memory
from utils.memory.measurement import Measurement
from utils.memory.meter import measure
from utils.memory.observer import phase
from utils.memory.timeline import Breakdown, Crossing, MemoryTimeline

__all__ = [
    "Allocation",
    "AllocationEvent",
    "Breakdown",
    "Budget",
    "Category",
    "Crossing",
    "Measurement",
    "MemoryTimeline",
    "OverBudgetError",
    "Phase",
    "ReachableStorage",
    "budget",
    "host_memory",
    "measure",
    "phase",
    "reachable_storages",
]  # fmt: skip

check_public(globals(), but=("Allocation",))
