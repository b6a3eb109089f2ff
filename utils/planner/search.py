"""`search`: the best plan of all, exactly, and fast because most are ruled out by a bound.

Every combination is looked at. Two bounds, each below what `estimate` would say, spare most of the
work: the lasting bytes of the fullest stage rule out what cannot fit, and the time of the blocks
alone, with the bubble, rules out what cannot be faster than a plan already found. Tests hold the
answer equal to that of trying everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.catalog.rules import of_kind, one_of
from utils.planner.bounds import (
    Front,
    alike,
    average_block_seconds,
    least_bytes,
    least_seconds,
    stage_key,
)
from utils.planner.choice import ERROR, Complexity, complexity, why_best
from utils.planner.cluster import Cluster
from utils.planner.estimate import Estimate, estimate
from utils.planner.host import node_host_bytes
from utils.planner.layout import Batch, Plan
from utils.planner.memory import StageMemory, fullest
from utils.planner.space import DEFAULT, Group, Space, candidates, groups
from utils.planner.stages import Stage, distinct, stages

__all__ = ["Plans", "Space", "candidates", "search"]

OBJECTIVES = ("seconds", "bytes")


@dataclass(frozen=True)
class Plans:
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
    space: Space = DEFAULT,
) -> Plans:
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
    model = model_shape(model)
    if isinstance(batch, (list, tuple)):
        return _of_several(model, cluster, batch, objective, space)
    of_kind("search", cluster=(cluster, Cluster), batch=(batch, Batch), space=(space, Space))
    one_of("objective", objective, OBJECTIVES)
    found = _Search(model, cluster, batch, space)
    found.run()
    return found.answer(objective)


def _of_several(
    model: ModelShape,
    cluster: Cluster,
    batches: list[Batch] | tuple[Batch, ...],
    objective: str,
    space: Space,
) -> Plans:
    if not batches:
        raise ValueError("search needs a batch: Batch(sequences=512, sequence_length=4096).")
    found = [search(model, cluster, batch, objective, space) for batch in batches]
    fitting = [plans for plans in found if plans.best]
    if not fitting:
        return found[0]

    def worth(plans: Plans) -> tuple[float, float]:
        assert plans.best is not None
        speed, needed = -plans.best.tokens_per_second, plans.best.peak.needed_bytes
        return (speed, needed) if objective == "seconds" else (needed, speed)

    return min(fitting, key=worth)


class _Search:
    """One search at work."""

    def __init__(self, model: ModelShape, cluster: Cluster, batch: Batch, space: Space) -> None:
        self.model, self.cluster, self.batch, self.space = model, cluster, batch, space
        self.room = cluster.device.memory_bytes
        self.groups = list(groups(model, cluster, batch, space))
        self.considered = sum(len(group.variants) for group in self.groups)
        if not self.considered:
            raise ValueError(_nothing_valid(model, cluster, batch, space))
        self.placed: dict[tuple[object, ...], list[Stage]] = {}
        self.lasting: dict[tuple[object, ...], float] = {}
        self.known: dict[Plan, Estimate] = {}
        self.front, self.roomy = Front(), Front()
        self.bounded = self._bounded()

    def run(self) -> None:
        """Find the plans that no other beats, and the fastest with headroom."""
        for seconds, group in self.bounded:
            for plan in group.plans():
                lasting = self._least_bytes(plan)
                if lasting > self.room or self._beaten(seconds, lasting):
                    continue
                needed = self._peak(plan).needed_bytes
                if self._fits(plan, needed) and not self._beaten(seconds, needed):
                    self._add(self._estimate(plan), needed)

    def answer(self, objective: str) -> Plans:
        """The plans found, and the one to take."""
        pareto, roomy = self.front.sorted(), self.roomy.sorted()
        closest = () if roomy else pareto[::-1][:3] or self._closest()
        fastest = roomy[0] if roomy else None
        best = fastest
        if fastest and objective == "seconds":
            best = self._simplest(fastest)
        elif roomy:
            best = roomy[-1]
        return Plans(best, pareto, closest, self.considered, len(self.known), fastest,
                     self._why(best, fastest, objective))  # fmt: skip

    def _why(self, best: Estimate | None, fastest: Estimate | None, objective: str) -> str:
        words = self.space.words(self.model, self.cluster, self.batch)
        exact = f"Exact within {self.considered:,} plans: {words}."
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
        for kind, seconds, plan in self._simpler(fastest, limit):
            if found is not fastest and kind > complexity(found.plan):
                break
            if seconds > limit or self._least_bytes(plan) > self.room:
                continue
            if self._fits(plan, self._peak(plan).needed_bytes):
                row = self._estimate(plan)
                if not row.tight and row.step_seconds <= limit:
                    found, limit = row, row.step_seconds
        return found

    def _simpler(self, fastest: Estimate, limit: float) -> list[tuple[Complexity, float, Plan]]:
        """Plans simpler than the fastest that may be within the limit: complexity, bound, plan."""
        kind = complexity(fastest.plan)
        rows = [(complexity(plan), seconds, plan)
                for seconds, group in self.bounded if seconds <= limit
                for plan in group.plans()]  # fmt: skip
        return sorted((row for row in rows if row[0] < kind), key=_kind_and_bound)

    def _bounded(self) -> list[tuple[float, Group]]:
        blocks: dict[tuple[object, ...], float] = {}
        rows = []
        for group in self.groups:
            key = alike(group.base)
            if key not in blocks:
                blocks[key] = average_block_seconds(
                    self.model, self.cluster, group.base, self.batch
                )
            rows.append((least_seconds(self.model, group.base, self.batch, blocks[key]), group))
        return sorted(rows, key=_first)

    def _beaten(self, seconds: float, needed: float) -> bool:
        """A plan like this can enter neither front."""
        return self.front.beats(seconds, needed) and self.roomy.beats(seconds, needed)

    def _add(self, found: Estimate, needed: float) -> None:
        self.front.add(found, needed)
        if not found.tight:
            self.roomy.add(found, needed)

    def _fits(self, plan: Plan, needed: float) -> bool:
        if needed > self.room:
            return False
        on_host = node_host_bytes(self.model, self.cluster, plan, self.batch)
        return on_host <= self.cluster.host_bytes_per_node

    def _estimate(self, plan: Plan) -> Estimate:
        if plan not in self.known:
            self.known[plan] = estimate(self.model, self.cluster, plan, self.batch)
        return self.known[plan]

    def _peak(self, plan: Plan) -> StageMemory:
        return fullest(self.model, plan, self.batch, self._places(plan))

    def _places(self, plan: Plan) -> list[Stage]:
        """The distinct stages of a plan: few of its choices change them."""
        key = stage_key(self.model, plan)
        if key not in self.placed:
            self.placed[key] = distinct(stages(self.model, plan))
        return self.placed[key]

    def _least_bytes(self, plan: Plan) -> float:
        key = (*stage_key(self.model, plan), plan.cp, plan.zero_stage, plan.offload, plan.precision)
        if key not in self.lasting:
            self.lasting[key] = least_bytes(self.model, plan, self._places(plan))
        return self.lasting[key]

    def _closest(self) -> tuple[Estimate, ...]:
        """The plans that lack least, three of different layouts."""
        least: dict[tuple[int, int, int], tuple[float, Plan]] = {}
        for group in self.groups:
            for plan in group.plans():
                layout, needed = (plan.tp, plan.pp, plan.cp), self._peak(plan).needed_bytes
                host = node_host_bytes(self.model, self.cluster, plan, self.batch)
                if host > self.cluster.host_bytes_per_node:
                    continue
                if layout not in least or needed < least[layout][0]:
                    least[layout] = (needed, plan)
        nearest = sorted(least.values(), key=lambda pair: pair[0])[:3]
        return tuple(self._estimate(plan) for _, plan in nearest)


def _nothing_valid(model: ModelShape, cluster: Cluster, batch: Batch, space: Space) -> str:
    """Why a space holds no plan: the first of its choices that divides nothing."""
    if not space.ep_sizes(model):
        return (
            f"No ep of {space.ep} divides {model.num_experts} experts. Nearest: ep=None, which tries "
            "every power of two that does."
        )
    if not any(batch.sequence_length % cp == 0 for cp in space.cp_sizes(batch)):
        return (
            f"No cp of {space.cp} divides {batch.sequence_length} tokens of a sequence. Nearest: "
            "cp=None, which tries powers of two from 16,384 tokens on."
        )
    return (
        f"No layout of {cluster.gpus} GPUs divides {model.heads} heads, {model.layers} layers and "
        f"{batch.sequences} sequences. Nearest: a batch that is a multiple of {cluster.gpus}, or a "
        f"number of GPUs that divides {batch.sequences}."
    )


def _kind_and_bound(row: tuple[Complexity, float, Plan]) -> tuple[Complexity, float]:
    return row[:2]


def _first(pair: tuple[float, Group]) -> float:
    return pair[0]
