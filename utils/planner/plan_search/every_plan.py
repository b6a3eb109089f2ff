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
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.plan_estimate import Estimate, estimated
from utils.planner.plan_search.bounds import (
    Front,
    alike,
    average_block_seconds,
    least_bytes,
    least_seconds,
    same_states,
)
from utils.planner.plan_search.candidate_plans import LayoutGroup, candidates, groups
from utils.planner.plan_search.choice import ERROR, Complexity, complexity, why_best
from utils.planner.plan_search.space import DEFAULT, SearchSpace, SearchTask
from utils.planner.stage_bytes import kind_memories
from utils.planner.stage_bytes.host import node_host_bytes
from utils.planner.stage_bytes.stage_memory import worst
from utils.rules import of_kind, one_of

__all__ = ["SearchResult", "SearchSpace", "candidates", "search"]

OBJECTIVES = ("seconds", "bytes")
Bounded = tuple[
    float, ClusterPlanContext, LayoutGroup
]  # the least seconds of a group's plans, and its context


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
        for seconds, context in _contexts(self.fastest_first):
            lasting = self._least_bytes(context)
            if lasting > self.room or self._beaten(seconds, lasting):
                continue
            needed = self._needed_bytes(context)
            if needed <= self.room and not self._beaten(seconds, needed):
                self._add(self._estimate(context), needed)

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
        for kind, seconds, context in self._simpler(fastest, limit):
            if found is not fastest and kind > complexity(found.plan):
                break
            if seconds > limit or self._least_bytes(context) > self.room:
                continue
            if self._needed_bytes(context) <= self.room:
                row = self._estimate(context)
                if not row.tight and row.step_seconds <= limit:
                    found, limit = row, row.step_seconds
        return found

    def _simpler(
        self, fastest: Estimate, limit: float
    ) -> list[tuple[Complexity, float, ClusterPlanContext]]:
        """Contexts simpler than the fastest that may be within the limit: complexity, bound, context."""
        most = complexity(fastest.plan)
        near = itertools.takewhile(lambda row: row[0] <= limit, self.fastest_first)
        rows = [(complexity(context.plan), bound, context) for bound, context in _contexts(near)]
        return sorted((row for row in rows if row[0] < most), key=lambda row: row[:2])

    def _bounded(self, found: list[LayoutGroup]) -> list[Bounded]:
        blocks: dict[tuple[object, ...], float] = {}
        rows: list[Bounded] = []
        for group in found:
            key, context = alike(group.base), self.task.context(group.base)
            if key not in blocks:
                blocks[key] = average_block_seconds(context)
            rows.append((least_seconds(context, blocks[key]), context, group))
        return rows

    def _beaten(self, seconds: float, needed: float) -> bool:
        """A plan like this can enter neither front."""
        return self.front.beats(seconds, needed) and self.roomy.beats(seconds, needed)

    def _add(self, found: Estimate, needed: float) -> None:
        self.front.add(found, needed)
        if not found.tight:
            self.roomy.add(found, needed)

    def _needed_bytes(self, context: ClusterPlanContext) -> float:
        """Of the fullest GPU; without end where the host has no room for what is offloaded."""
        rows = kind_memories(context)
        on_host = node_host_bytes(context.cluster, rows)
        over = on_host > context.cluster.host_bytes_per_node
        return math.inf if over else worst(rows).needed_bytes

    def _estimate(self, context: ClusterPlanContext) -> Estimate:
        if context.plan not in self.known:
            self.known[context.plan] = estimated(context)
        return self.known[context.plan]

    def _least_bytes(self, context: ClusterPlanContext) -> float:
        key = same_states(context.model, context.plan)
        if key not in self.lasting:
            self.lasting[key] = least_bytes(context)
        return self.lasting[key]

    def _closest(self) -> tuple[Estimate, ...]:
        """The plans that lack least, three of different layouts."""
        least: dict[tuple[int, int, int], tuple[float, ClusterPlanContext]] = {}
        for _, context in _contexts(self.rows):
            plan, needed = context.plan, self._needed_bytes(context)
            layout = plan.tp, plan.pp, plan.cp
            if needed < least.get(layout, (math.inf, context))[0]:
                least[layout] = (needed, context)
        nearest = sorted(least.values(), key=lambda pair: pair[0])[:3]
        return tuple(self._estimate(context) for _, context in nearest)


def _contexts(rows: Iterable[Bounded]) -> Iterator[tuple[float, ClusterPlanContext]]:
    """Every plan of some groups, with its least seconds."""
    for seconds, context, group in rows:
        for variant in group.variants:
            yield seconds, context.varied(variant)
