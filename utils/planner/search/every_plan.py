"""`search`: the best plan of all, exactly, and fast because most are ruled out by a bound.

Every combination is looked at. Two bounds, each below what `estimate` would say, spare most of the
work: the lasting bytes of the fullest stage rule out what cannot fit, and the time of the blocks
alone, with the bubble, rules out what cannot be faster than a plan already found. Tests hold the
answer equal to that of trying everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.catalog.rules import of_kind, one_of
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.estimate import Estimate, estimated
from utils.planner.layout import Plan
from utils.planner.memory import kind_memories
from utils.planner.memory.host import node_host_bytes
from utils.planner.memory.stage_memory import worst
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.search.bounds import (
    Front,
    alike,
    average_block_seconds,
    least_bytes,
    least_seconds,
    same_states,
)
from utils.planner.search.candidates import LayoutGroup, candidates, groups
from utils.planner.search.choice import ERROR, Complexity, complexity, why_best
from utils.planner.search.space import DEFAULT, SearchSpace, SearchTask

__all__ = ["SearchResult", "SearchSpace", "candidates", "search"]

OBJECTIVES = ("seconds", "bytes")
Bounded = tuple[
    float, ClusterPlanContext, LayoutGroup
]  # the least seconds of a group's plans, and its setup


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: The plan to take: of those that fit with headroom and are within the planner's error
            of the fastest, the simplest; for bytes the smallest. None where there is none.
        fastest: The fastest that fits with headroom, however complicated.
        pareto: Plans that fit and that no other beats in both seconds and bytes, fastest first.
        closest: Where `best` is None, the plans that lack least, each of another layout; or, where
            some fit but without headroom, the smallest of these.
        considered: Combinations looked at.
        estimated: Those that no bound had ruled out.
        why: Why `best`, and within which space that is exact.
    """

    best: Estimate | None
    pareto: tuple[Estimate, ...]
    closest: tuple[Estimate, ...]
    considered: int
    estimated: int
    fastest: Estimate | None = None
    why: str = ""


def search(
    model: ModelShape | str,
    cluster: Cluster,
    batch: Batch | list[Batch] | tuple[Batch, ...],
    objective: str = "seconds",
    space: SearchSpace = DEFAULT,
) -> SearchResult:
    """The best plan for a model, a cluster and a batch.

    Args:
        model: What is trained: a shape, or a name of the catalog.
        cluster: On what; every plan uses all of it.
        batch: The global batch; or several, of which the best in seconds a token is taken.
        objective: "seconds" of a step (so dollars as well), or "bytes" of the fullest GPU.
        space: The choices to combine.

    Raises:
        ValueError: an unknown objective, no batch, or no combination is even valid.
    """
    model, found = model_shape(model), []
    batches = batch if isinstance(batch, (list, tuple)) else [batch]
    if not batches:
        raise ValueError("search needs a batch: Batch(sequences=512, sequence_length=4096).")
    for one in batches:
        of_kind(
            "search", cluster=(cluster, Cluster), batch=(one, Batch), space=(space, SearchSpace)
        )
        one_of("objective", objective, OBJECTIVES)
        found.append(_Search(SearchTask(model, cluster, one, space)).answer(objective))
    return _best_of(found, objective)


def _best_of(found: list[SearchResult], objective: str) -> SearchResult:
    def worth(plans: SearchResult) -> tuple[float, float]:
        assert plans.best is not None
        speed, needed = -plans.best.tokens_per_second, plans.best.peak.needed_bytes
        return (speed, needed) if objective == "seconds" else (needed, speed)

    return min((plans for plans in found if plans.best), key=worth, default=found[0])


class _Search:
    """One search at work: branch and bound."""

    def __init__(self, task: SearchTask) -> None:
        self.task = task
        self.room = task.cluster.device.memory_bytes
        found = list(groups(task))
        self.considered = sum(len(group.variants) for group in found)
        if not self.considered:
            raise ValueError(task.why_empty())
        self.lasting: dict[tuple[object, ...], float] = {}
        self.known: dict[Plan, Estimate] = {}
        self.front, self.roomy = Front(), Front()
        self.rows = self._bounded(found)
        self.fastest_first = sorted(self.rows, key=lambda row: row[0])

    def _run(self) -> None:
        """Find the plans that no other beats, and the fastest with headroom."""
        for seconds, setup in _setups(self.fastest_first):
            lasting = self._least_bytes(setup)
            if lasting > self.room or self._beaten(seconds, lasting):
                continue
            needed = self._needed_bytes(setup)
            if needed <= self.room and not self._beaten(seconds, needed):
                self._add(self._estimate(setup), needed)

    def answer(self, objective: str) -> SearchResult:
        """The plans found, and the one to take."""
        self._run()
        pareto, roomy = self.front.sorted(), self.roomy.sorted()
        closest = () if roomy else pareto[::-1][:3] or self._closest()
        fastest = roomy[0] if roomy else None
        best = fastest
        if fastest and objective == "seconds":
            best = self._simplest(fastest)
        elif roomy:
            best = roomy[-1]
        why = self._why(best, fastest, objective)
        return SearchResult(best, pareto, closest, self.considered, len(self.known), fastest, why)

    def _why(self, best: Estimate | None, fastest: Estimate | None, objective: str) -> str:
        exact = f"Exact within {self.considered:,} plans: {self.task}."
        if best is None or fastest is None:
            some = (
                "Some fit, all of them within the allocator's reach" if self.front else "None fits"
            )
            return f"{some}. {exact}"
        if objective == "bytes":
            return f"The smallest that fits with headroom. {exact}"
        return f"{why_best(best, fastest)} {exact}"

    def _simplest(self, fastest: Estimate) -> Estimate:
        """Of the plans within the error of the fastest, the fastest of the simplest kind."""
        found, limit = fastest, fastest.step_seconds * (1 + ERROR)
        for kind, seconds, setup in self._simpler(fastest, limit):
            if found is not fastest and kind > complexity(found.plan):
                break
            if seconds > limit or self._least_bytes(setup) > self.room:
                continue
            if self._needed_bytes(setup) <= self.room:
                row = self._estimate(setup)
                if not row.tight and row.step_seconds <= limit:
                    found, limit = row, row.step_seconds
        return found

    def _simpler(
        self, fastest: Estimate, limit: float
    ) -> list[tuple[Complexity, float, ClusterPlanContext]]:
        """Setups simpler than the fastest that may be within the limit: complexity, bound, setup."""
        most = complexity(fastest.plan)
        near = itertools.takewhile(lambda row: row[0] <= limit, self.fastest_first)
        rows = [(complexity(setup.plan), bound, setup) for bound, setup in _setups(near)]
        return sorted((row for row in rows if row[0] < most), key=lambda row: row[:2])

    def _bounded(self, found: list[LayoutGroup]) -> list[Bounded]:
        blocks: dict[tuple[object, ...], float] = {}
        rows: list[Bounded] = []
        for group in found:
            key, setup = alike(group.base), self.task.setup(group.base)
            if key not in blocks:
                blocks[key] = average_block_seconds(setup)
            rows.append((least_seconds(setup, blocks[key]), setup, group))
        return rows

    def _beaten(self, seconds: float, needed: float) -> bool:
        """A plan like this can enter neither front."""
        return self.front.beats(seconds, needed) and self.roomy.beats(seconds, needed)

    def _add(self, found: Estimate, needed: float) -> None:
        self.front.add(found, needed)
        if not found.tight:
            self.roomy.add(found, needed)

    def _needed_bytes(self, setup: ClusterPlanContext) -> float:
        """Of the fullest GPU; without end where the host has no room for what is offloaded."""
        rows = kind_memories(setup)
        on_host = node_host_bytes(setup.cluster, rows)
        over = on_host > setup.cluster.host_bytes_per_node
        return math.inf if over else worst(rows).needed_bytes

    def _estimate(self, setup: ClusterPlanContext) -> Estimate:
        if setup.plan not in self.known:
            self.known[setup.plan] = estimated(setup)
        return self.known[setup.plan]

    def _least_bytes(self, setup: ClusterPlanContext) -> float:
        key = same_states(setup.model, setup.plan)
        if key not in self.lasting:
            self.lasting[key] = least_bytes(setup)
        return self.lasting[key]

    def _closest(self) -> tuple[Estimate, ...]:
        """The plans that lack least, three of different layouts."""
        least: dict[tuple[int, int, int], tuple[float, ClusterPlanContext]] = {}
        for _, setup in _setups(self.rows):
            plan, needed = setup.plan, self._needed_bytes(setup)
            layout = plan.tp, plan.pp, plan.cp
            if needed < least.get(layout, (math.inf, setup))[0]:
                least[layout] = (needed, setup)
        nearest = sorted(least.values(), key=lambda pair: pair[0])[:3]
        return tuple(self._estimate(setup) for _, setup in nearest)


def _setups(rows: Iterable[Bounded]) -> Iterator[tuple[float, ClusterPlanContext]]:
    """Every plan of some groups, with its least seconds."""
    for seconds, setup, group in rows:
        for variant in group.variants:
            yield seconds, setup.varied(variant)
