"""Case "eight_nodes": a job on eight nodes with several causes, layer by layer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import judge, scored
from utils.labs.kinds import Kind, number, one_of, several, whole
from utils.labs.slow_jobs import GRADIENT_BYTES, NODES, TCP, SlowJob
from utils.labs.verdict import Verdict, correct, not_yet
from utils.units import Evidence

from .sheet import Gains, Sheet

LAYERS = ("hardware", "network", "collectives", "code")
NONE = "none"
_JOBS = {
    1: SlowJob(
        slow_nodes=((3, 1.3),), network=TCP, load_seconds=tuple((n, 0.1) for n in range(NODES))
    ),
    2: SlowJob(weak_ports=((6, 0.05),), reduced_passes=12, load_seconds=((4, 0.2),)),
    3: SlowJob(slow_nodes=((1, 1.5),), load_seconds=((5, 0.4),), reduced_passes=64),
}
_PLACES: dict[int, dict[str, int | str]] = {
    1: {"hardware": 3, "network": "all", "collectives": NONE, "code": "all"},
    2: {"hardware": NONE, "network": 6, "collectives": "all", "code": 4},
    3: {"hardware": 1, "network": NONE, "collectives": "all", "code": 5},
}
_FIELDS = {
    "hardware": ("slow_nodes",),
    "network": ("network", "weak_ports"),
    "collectives": ("reduced_passes",),
    "code": ("load_seconds",),
}


@dataclass(frozen=True)
class EightNodes:
    """A slow job: look at it layer by layer, and run it again with layers mended.

    Attributes:
        seed: Whose.
    """

    seed: int

    def look(self, layer: str) -> str:
        """What the tools of a layer print."""
        return _JOBS[self.seed].look(layer)

    def step_seconds(self, *mended: str) -> float:
        """A step's seconds, with these layers mended."""
        fields = [name for layer in mended for name in _FIELDS[layer]]
        return _JOBS[self.seed].fixed(*fields).step().step_seconds

    @property
    def one_node_seconds(self) -> float:
        """A step of one healthy node, with the same batch a GPU."""
        return SlowJob(nodes=1).step().step_seconds

    def times_one_node(self, *mended: str) -> float:
        """How many times as fast as one node the eight are."""
        return NODES * self.one_node_seconds / self.step_seconds(*mended)

    def __str__(self) -> str:
        parts = [f"{layer}:\n{self.look(layer)}" for layer in LAYERS]
        return "\n".join(
            [
                f"Eight nodes of eight GPUs train one model with data parallelism: {self.step_seconds():.3f} s a step.",
                f"One node takes {self.one_node_seconds:.3f} s for an eighth of the batch. What the tools show (simulated):",
                *parts,
                "Which layers are at fault and where, in which order do you mend them so that each cure",
                "saves most of what is left, and how many times as fast as one node are eight, now and then?",
            ]
        )


@functools.cache
def data(seed: int) -> EightNodes:
    """The job of a seed."""
    return EightNodes(seed)


def best_order(case: EightNodes) -> tuple[str, ...]:
    """The layers at fault; first the one whose cure saves most, then the next, and so on."""
    left = [layer for layer in LAYERS if _PLACES[case.seed][layer] != NONE]
    done: list[str] = []
    while left:
        done.append(min(left, key=lambda layer: case.step_seconds(*done, layer)))
        left.remove(done[-1])
    return tuple(done)


def _verdict(case: EightNodes, answer: Mapping[str, Any]) -> Verdict:
    told = {
        "hardware": "Compare the clocks.",
        "network": "What transport does NCCL name, and is one port's rate different?",
        "collectives": "How many bytes do a step's all-reduces carry together, and how many have the gradients?",
        "code": "Who waits in next(iter(loader))?",
    }
    for layer, place in _PLACES[case.seed].items():
        if problem := judge(
            answer[layer],
            place,
            f"the {layer}",
            expected='a node, "all" or "none"',
            nudge=told[layer],
        ):
            return problem
    if problem := _wrong_order(case, answer["order"]):
        return problem
    now, then = case.times_one_node(), case.times_one_node(*answer["order"])
    wrong = {
        case.one_node_seconds
        / case.step_seconds(): "That is the efficiency: eight nodes do eight times the work."
    }
    problem = judge(
        answer["times one node"],
        now,
        "how many times as fast",
        relative=0.02,
        expected="a number below 8",
        wrong=wrong,
        nudge="Eight times the work, one_node_seconds over step_seconds.",
    )
    problem = problem or judge(
        answer["times one node, mended"],
        then,
        "the same when mended",
        relative=0.02,
        expected="a number up to 8",
        nudge="Mend all of your layers, and measure again.",
    )
    return problem or correct(
        " then ".join(answer["order"]),
        score=scored(round(then, 2), round(then, 2), "times one node"),
    )


def _wrong_order(case: EightNodes, order: tuple[str, ...]) -> Verdict | None:
    right = best_order(case)
    if sorted(order) != sorted(right):
        return not_yet(
            "the order",
            got=", ".join(order),
            expected="each layer at fault, once",
            nudge="The layers that you found at fault, and no other.",
        )
    for place, (mine, best) in enumerate(itertools.pairwise(((), *_prefixes(order)))):
        least = case.step_seconds(*right[: place + 1])
        if case.step_seconds(*best) > 1.001 * least:
            return not_yet(
                f"the cure number {place + 1}",
                got=order[place],
                expected="the one that saves most then",
                nudge=f"After {', '.join(mine) or 'nothing'}: measure each cure that is left with "
                "case.step_seconds(*mended). What another fault hides saves nothing yet.",
            )
    return None


def _prefixes(order: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [order[:count] for count in range(1, len(order) + 1)]


def _gains(case: EightNodes, answer: Mapping[str, Any]) -> Gains:
    return Gains(bytes_sent=2 * (NODES - 1) / NODES * GRADIENT_BYTES, evidence=Evidence.SIMULATED)


def _place(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().lower() in ("all", NONE):
        return value.strip().lower()
    return whole().read(value)


SHEET = Sheet(
    "Eight nodes, three times as fast",
    "advanced",
    "diagnosing a slow job, layer by layer",
    "Eight nodes are only three times as fast as one: why?",
    ("11",),
    {
        **{layer: Kind('a node, "all" or "none"', _place) for layer in LAYERS},
        "order": several(one_of(*LAYERS, what="a layer"), what="a list of layers"),
        "times one node": number(),
        "times one node, mended": number(),
    },
    data,
    _verdict,
    _gains,
)
