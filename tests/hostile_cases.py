"""What the checks of all labs must survive: junk, and right answers written in other ways."""

from __future__ import annotations

import decimal
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import capstone_cases
import numpy as np
import torch
import torch.nn.functional as F
from lab_cases import definitions, solved_lab
from torch import nn

from utils.clinic import lab_ward
from utils.labs.checking import checks_of, lab_numbers
from utils.labs.faulty_runs import fault_of
from utils.lessons.lesson_13.programs import BROKEN
from utils.lessons.lesson_15 import checks as lab_15
from utils.lessons.lesson_16.dead_runs import PLANTED
from utils.memory import measure
from utils.planner import Plan
from utils.planner.goodput import DAY, waiting_seconds, working_share
from utils.planner.schedules import order
from utils.techniques.zero import zero_config


class Broken:
    """An object that cannot be shown or compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


class Empty:
    """A class without anything that an exercise asks for."""


def circle() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1]
    found.append(found)
    return found


JUNK = {
    "None": None,
    "True": True,
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "numpy NaN": np.float32("nan"),
    "numpy infinity": np.float64("inf"),
    "numpy bool": np.True_,
    "a huge int": 10**400,
    "an int too long to write": 10**5000,
    "a negative number": -3,
    "an odd fraction": 1234.5678,
    "complex": 3 + 4j,
    "decimal NaN": decimal.Decimal("NaN"),
    "empty text": "",
    "text": "a guess",
    "number as text": "12",
    "long text": "x" * 10**6,
    "bytes": b"12",
    "empty list": [],
    "list": [12],
    "list of NaN": [math.nan, math.nan],
    "nested list": [[1, [2]], {"a": 1}],
    "circle": circle(),
    "empty tuple": (),
    "two texts": ("a", "b"),
    "two NaN": (math.nan, math.nan),
    "three Nones": (None, None, None),
    "empty dict": {},
    "other keys": {"wrong": 1, "keys": 2, 3: 4},
    "dict of NaN": {"a": math.nan},
    "set": {1, 7},
    "generator": (x for x in ()),
    "range": range(3),
    "object": object(),
    "broken object": Broken(),
    "tensor": torch.zeros(3),
    "tensor without dimensions": torch.tensor(math.nan),
    "array": np.arange(3),
    "array of NaN": np.array([math.nan]),
    "module": math,
}


def nothing_left(*args: Any, **settings: Any) -> Any:
    """Ends as an iterator does."""
    return next(iter(()))


def gradients_off(*args: Any, **settings: Any) -> int:
    """Leaves PyTorch's gradients switched off."""
    torch.set_grad_enabled(False)
    return 12


CODE = {
    "nothing left": nothing_left,
    "gradients off": gradients_off,
    "class": Empty,
    "builtin": len,
    "no arguments": lambda: 12,
    "nine arguments": lambda a, b, c, d, e, f, g, h, i: 12,
    "a partial": functools.partial(max, 1),
}


def returning(value: Any) -> Callable[..., Any]:
    """A function that takes anything and gives this."""
    return lambda *args, **settings: value


OF_RANKS = [
    "04.accumulate", "04.by_hand", "04.deadlock", "09.zero_1", "11.ordered_ring",
    "11.tree_broadcast", "12.row_parallel", "14.clip_over_axes",
]  # fmt: skip


def all_exercises() -> list[str]:
    """Every check of the course: "01.adam_states"."""
    numbers = [number for number in lab_numbers() if number != "97"]
    return [f"{number}.{name}" for number in numbers for name in checks_of(number)]


_MISSING = lab_15._on_64(lab_15.OOM_PLAN).missing_bytes / 2**30
VALUES = {
    "01.momentum_bytes": 12,
    "01.doubled_batch": 10,
    "01.peak_moves": "less",
    "02.added_bytes": 2,
    "02.what_halves": "activations",
    "02.linear_rate": 0.2,
    "03.counter_stops": 2048,
    "03.smallest_update": 0.5,
    "03.skipped_steps": 7,
    "04.ring_of_eight": 7,
    "04.bytes_under_amp": "same",
    "04.repeated_items": 5,
    "05.last_block": "no",
    "05.tiny_layers": 16,
    "05.best_segment": 2,
    "07.offloaded_gigabytes": 0.16,
    "07.without_offload": 0,
    "08.ungrouped_kib": 2560,
    "08.independent_inputs": 0,
    "08.large_batch": 1,
    "09.stage_2_on_8": 3.75,
    "09.one_gpu": 0,
    "09.reduced_times": 8,
    "12.other_way": 2,
    "12.mb_per_layer": 268.4,
    "10.which_sum": "total_size",
    "10.waiting_batches": 48,
    "11.ring_of_64": 1.97,
    "11.fewer_on_64": 1.125,
    "11.which_uses_tcp": "first",
    "11.nic_of_gpu2": 2,
    "11.ranks_of_that_run": 24,
    "11.node_to_look_at": 3,
    "13.micro_batches": 70,
    "13.held": 4,
    "13.messages": 736,
    "14.same_rows": [0, 1, 4, 5],
    "14.which_bug": 3,
    "14.turning_point": 1815,
    "16.interval_factor": 0.5,
    "15.gb_per_gpu": 18 * 130 / 64,
    "15.micro_batches": 300,
    "15.plan_175b": Plan(tp=8, pp=8, sequence_parallel=True, micro_batch=2),
    "17.steps_twice": 2,
    "17.training_share": 0.75,
    "15.fix_by_one_change": replace(lab_15.TO_FIX, sequence_parallel=True),
}  # right answers that are no functions


OF_PARTS = (
    "01.read_timeline", "02.diagnose", "02.did_not_halve", "03.diagnosis", "05.diagnosis",
    "06.fit", "07.diagnosis", "08.diagnosis", "09.accumulation", "10.patient_1", "11.job_a",
    "11.job_b", "11.job_c", "12.diagnosis", "13.diagnosis", "14.two_faults", "15.explain_oom",
    "15.two_cards", "16.dead_runs", "99.nan_run", "99.order_of_cures", "99.lay_out", "99.survive",
    "99.two_offers",
)  # fmt: skip


@functools.cache
def right_dicts() -> dict[str, dict[str, Any]]:
    """Right answers of several parts, those of `OF_PARTS`. One of them loads DeepSpeed."""
    return {
        "01.read_timeline": {
            "phase of the peak": "optimizer step",
            "temporaries / parameters at the peak": 2,
            "half the batch lowers the peak by a tenth or more": False,
        },
        "02.diagnose": {"run A": "half with Adam", "run B": "new scaler each step",
                        "run C": "no scaler"},
        "02.did_not_halve": {"relu": "halves", "pool": "stays", "gelu": "halves", "wide": "grows"},
        "03.diagnosis": {name: fault_of(name) for name in "ABCDE"},
        "05.diagnosis": {"what differs": "buffers", "updates per step": 2},
        "06.fit": {"method": "LoRA", "sequence length": 1024, "micro-batch": 29},
        "08.diagnosis": {"same kind shows it": "no", "what shows it": "text that the model will read"},
        "07.diagnosis": {"waits": 72, "idle seconds": 108.0, "least seconds": 60.0},
        "09.accumulation": {
            "collective that grew": "all-reduce",
            "times that gradients are sent": 4,
            "cured configuration": zero_config(1, 1_000_000, world_size=4, micro_batch=1,
                                               accumulation=4),
        },
        "12.diagnosis": {
            "run A": "a sum missing in backward", "where in run A": "attention of block 1",
            "run B": "dropout of the stream differs between ranks",
            "run C": "dropout of scores alike on all ranks",
        },
        "10.patient_1": {"cause": "forgotten reference", "category": "activations", "line": 43,
                         "cure": lab_ward.WARD[1].cure},
        "11.job_a": {"layer": "code", "node": 2, "seconds saved": 0.22},
        "11.job_b": {"layer": "collectives", "node": "all", "seconds saved": _saved("B", "bucket_bytes")},
        "11.job_c": {"layer": "network", "node": 6, "seconds saved": _saved("C", "weak_ports")},
        "13.diagnosis": {"circle": [1, 2], "cured": cured_13()},
        "14.two_faults": {"A: axis": "pp", "A: fault": 3, "B: axis": "shard", "B: fault": 2},
        "15.explain_oom": {"fullest stage": 0, "largest category": "activations",
                           "missing GiB": _MISSING},
        "16.dead_runs": {name: planted._asdict() for name, planted in PLANTED.items()},
        "15.two_cards": {"bill": solution("15", "bill"), "an A10 holds the states": False,
                         "choice": "A100"},
        **{f"99.{name}": {"seed": 2, **capstone_cases.right(name, 2)}
           for name in ("nan_run", "order_of_cures", "lay_out", "survive", "two_offers")},
    }  # fmt: skip


def _saved(job: str, cause: str) -> float:
    """What curing one cause of a slow job saves."""
    from utils.labs.slow_jobs import unknown_job

    slow = unknown_job(job)
    return slow.step().step_seconds - slow.fixed(cause).step().step_seconds


def cured_13() -> list[list[str]]:
    """Lab 13's broken program with the warm-up of rank 2 put right."""
    right = [[str(action) for action in row] for row in order("1f1b", 4, 6)]
    return [right[2] if rank == 2 else row for rank, row in enumerate(BROKEN)]


NUMERIC = {
    "01": ["state_bytes", "saved_bytes", "largest_batch"],
    "02": ["predicted_peak", "measured_peak", "kept_by_module", "largest_on_card", "amp_step"],
    "03": ["decode_float", "find_bad_data"],
    "04": ["exposed_seconds", "make_buckets"],
    "05": ["predicted_bytes", "best_set"],
    "06": ["lora_states"],
    "07": ["exposed_seconds", "best_choice"],
    "08": ["admitted"],
    "09": ["largest_moment", "sent_bytes", "cheapest_plan"],
    "11": ["finish_seconds"],
    "12": ["kept_bytes", "dropout_seed"],
    "13": ["cut_layers"],
    "14": ["place_axes", "deal_layers"],
    "15": ["token_budget"],
    "16": ["days_and_dollars"],
}  # functions that return numbers, or tuples, lists and dicts of them
_SOURCES = {
    "01": "beginner/01_where_memory_goes", "02": "beginner/02_mixed_precision",
    "03": "beginner/03_when_numbers_break", "04": "beginner/04_four_ranks",
    "05": "intermediate/05_checkpointing", "06": "intermediate/06_seven_billion",
    "07": "intermediate/07_offload", "08": "intermediate/08_smaller_weights",
    "09": "intermediate/09_sharding", "11": "advanced/11_links",
    "12": "advanced/12_tensor_parallel", "13": "advanced/13_pipelines",
    "14": "advanced/14_three_dimensions",
    "15": "advanced/15_design_studio", "16": "advanced/16_runs_that_survive",
    "17": "advanced/17_cluster_and_budget",
}  # fmt: skip


def solution(number: str, name: str) -> Callable[..., Any]:
    """A lab's own solution of an exercise."""
    names = {"torch": torch, "F": F, "nn": nn, "math": math, "measure": measure,
             "itertools": itertools}  # fmt: skip
    ends = ("\n\n\nfound = ", "\n\n\ncalls = ")
    if number == "05":
        from utils.techniques import activation_peak, recompute_flops

        names |= {"activation_peak": activation_peak, "recompute_flops": recompute_flops}
    if number == "16":
        names |= {"DAY": DAY, "waiting_seconds": waiting_seconds, "working_share": working_share}
    if number == "07":
        from utils.techniques import offload_choice as choice

        names |= {"itertools": itertools, "offloaded_seconds": choice.offloaded_seconds,
                  "on_card": choice.on_card, "on_host": choice.on_host}  # fmt: skip
    source = solved_lab(_SOURCES[number])
    return definitions(source, *ends, starts=(f"def {name}(",), **names)[name]


def in_numpy(value: Any) -> Any:
    """The same with numpy's numbers, in tuples, lists and dicts too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, tuple, list, dict)):
        return value
    if isinstance(value, (int, float)):
        return np.int64(value) if isinstance(value, int) else np.float64(value)
    if isinstance(value, dict):
        return {key: in_numpy(part) for key, part in value.items()}
    return type(value)(map(in_numpy, value))


def numpied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with numpy's numbers as its result."""
    return lambda *args, **settings: in_numpy(function(*args, **settings))
