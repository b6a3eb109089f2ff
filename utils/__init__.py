"""The course's shared package: `from utils import setup, measure, compare, ...`.

Names are imported when they are first used, so that parts without torch need no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from utils.moved import find_by_earlier_names

_HOME = {
    "setup": "utils.start",
    "scratch": "utils.files",
    "scratch_folder": "utils.files",
    "Evidence": "utils.units",
    "format_bytes": "utils.units",
    "format_count": "utils.units",
    "format_seconds": "utils.units",
    "parse_bytes": "utils.units",
    "GB": "utils.units",
    "GIB": "utils.units",
    "MB": "utils.units",
    "MIB": "utils.units",
    "Category": "utils.memory",
    "Measurement": "utils.memory",
    "OverBudgetError": "utils.memory",
    "budget": "utils.memory",
    "measure": "utils.memory",
    "phase": "utils.memory",
    "check": "utils.labs",
    "score": "utils.labs.scoreboard",
    "scoreboard": "utils.labs.scoreboard",
    "RankError": "utils.ranks",
    "rank_device": "utils.ranks",
    "prepare_ranks": "utils.ranks",
    "run_ranks": "utils.ranks",
    "run_torchrun": "utils.ranks",
    "traffic": "utils.traffic",
    "fit_alpha_beta": "utils.traffic.cost",
    "simulate": "utils.simulation",
    "sweep": "utils.simulation",
    "MixedStep": "utils.techniques",
    "computes": "utils.techniques",
    "low_precision": "utils.techniques",
    "tf32": "utils.techniques",
    "recorded_table": "evidence.record",
    "FlightRecorder": "utils.techniques",
    "Transformer": "utils.models",
    "TransformerConfig": "utils.models",
    "UNet": "utils.models",
    "llama_config": "utils.models",
    "load_base": "utils.models",
    "resnet": "utils.models",
    "small_resnet": "utils.models",
    "checkpoint_blocks": "utils.techniques",
    "cifar10": "utils.data",
    "text_batches": "utils.data",
    "text_tokens": "utils.data",
    "device": "utils.catalog",
    "model_shape": "utils.catalog",
    "compare": "utils.views",
    "draw_breakdown": "utils.views",
    "draw_holders": "utils.views",
    "draw_lanes": "utils.views",
    "draw_losses": "utils.views",
    "draw_memory_by_batch": "utils.views",
    "draw_over_time": "utils.views",
    "draw_pareto": "utils.views",
    "draw_peaks": "utils.views",
    "draw_ranks": "utils.views",
    "draw_schedule": "utils.views",
    "draw_schedules": "utils.views",
    "draw_stage_memory": "utils.views",
    "draw_timeline": "utils.views",
    "draw_validation": "utils.views",
    "explore": "utils.views",
    "predicted": "utils.views",
    "reconcile": "utils.views",
    "show": "utils.views",
    "Span": "utils.views",
    "Batch": "utils.planner",
    "Cluster": "utils.planner",
    "Lora": "utils.planner",
    "Plan": "utils.planner",
    "Space": "utils.planner",
    "compare_plans": "utils.planner",
    "cost": "utils.planner",
    "estimate": "utils.planner",
    "explain": "utils.planner",
    "export": "utils.planner",
    "goodput": "utils.planner",
    "one_change_that_fits": "utils.planner",
    "search": "utils.planner",
    "why_it_does_not_fit": "utils.planner",
    "validate": "evidence.validation",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'utils' has no name {name!r}; it offers: {sorted(_HOME)}")
    from utils.checked import checked  # here: the set-up runs in this package before all else

    return checked(getattr(importlib.import_module(_HOME[name]), name), __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


find_by_earlier_names()
