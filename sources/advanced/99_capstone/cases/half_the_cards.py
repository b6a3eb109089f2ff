"""Case "half_the_cards": 32 GPUs and a model that does not fit; the main worry as a number."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from utils.catalog import link
from utils.labs.cases import judge, scored
from utils.labs.kinds import number, one_of
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import (
    Batch,
    Cluster,
    Estimate,
    Plan,
    SearchSpace,
    axis_bytes,
    estimate,
    plan_name,
    search,
)
from utils.units import GB, GIB, format_bytes, format_seconds

from .plans import estimated, plan_kind, room
from .sheet import Gains, Sheet

SLACK = 0.10
_RUNS = {1: ("gpt-3-175b", 1800), 2: ("bloom-176b", 1800), 3: ("megatron-145b", 1000)}
WORRIES = (
    "communication across nodes",
    "the pipeline's bubble",
    "the optimizer's arithmetic",
    "reading the data",
)
ZERO_3 = Plan(dp=32, zero_stage=3, recompute="full", offload="optimizer")


@dataclass(frozen=True)
class HalfTheCards:
    """A model on 4 nodes of 8 A100-80GB.

    Attributes:
        model: Its name in the catalog.
        cluster: The machines.
        batch: The global batch.
    """

    model: str
    cluster: Cluster
    batch: Batch

    @property
    def on_ethernet(self) -> Cluster:
        """The same machines, each behind one port of 10 Gb/s Ethernet."""
        return replace(
            self.cluster, network_bytes_per_second=link("Ethernet 10G").link_bytes_per_second
        )

    def __str__(self) -> str:
        bare = search(self.model, self.cluster, self.batch)
        lacks = format_bytes(bare.closest[0].missing_bytes)
        ports = self.cluster.network_bytes_per_second / (25 * GB)
        return "\n".join(
            [
                f"{self.model} on 32 A100-80GB, 4 nodes of 8, {ports:.0f} network ports of 200 Gb/s a node; a host has",
                f"{format_bytes(self.cluster.host_bytes_per_node)}; {self.batch.sequences} sequences of {self.batch.sequence_length} "
                "tokens a step.",
                f"Of {bare.considered:,} plans without offload none fits: the nearest lacks {lacks} a GPU (predicted).",
                "Give a Plan that fits with headroom, at most 10% slower than the fastest; how many times as long its step is",
                "with one port of 10 Gb/s Ethernet a node (case.on_ethernet); the same for ZeRO-3 over all ranks",
                '(Plan(dp=32, zero_stage=3, recompute="full", offload="optimizer")), and the main worry.',
            ]
        )


@functools.cache
def data(seed: int) -> HalfTheCards:
    """The machines of a seed."""
    model, host = _RUNS[seed]
    cluster = Cluster(
        gpu="A100-80GB",
        nodes=4,
        host_memory_bytes=host * GIB,
        network_bytes_per_second={1: 2, 2: 8, 3: 4}[seed] * 25 * GB,
    )
    return HalfTheCards(model, cluster, Batch(sequences=512, sequence_length=2048))


@functools.cache
def par(model: str) -> Estimate:
    """The fastest plan with the optimizer on the host."""
    case = next(data(seed) for seed, run in _RUNS.items() if run[0] == model)
    found = search(
        case.model, case.cluster, case.batch, space=SearchSpace(offload=("none", "optimizer"))
    ).fastest
    assert found is not None, "each of these models fits with the host's memory"
    return found


def slower_on_ethernet(case: HalfTheCards, plan: Plan) -> float:
    """How many times as long a step is there."""
    fast = estimate(case.model, case.cluster, plan, case.batch)
    return estimate(case.model, case.on_ethernet, plan, case.batch).step_seconds / fast.step_seconds


def _verdict(case: HalfTheCards, answer: Mapping[str, Any]) -> Verdict:
    plan = answer["plan"]
    if plan.lora is not None or plan.conventions.name != "megatron":
        return not_yet("every parameter trains, and framework is left as it is")
    found = estimated(case.model, case.cluster, plan, case.batch, "the plan")
    if isinstance(found, Verdict):
        return found
    nudge = (
        "18 bytes a parameter over 32 cards are more than a card has, however they are split. Where else is memory?"
        if plan.offload == "none"
        else "What is left on the cards, and which axis splits it?"
    )
    if problem := room(found, "the plan", nudge):
        return problem
    slower = found.step_seconds / par(case.model).step_seconds - 1
    if slower > SLACK:
        nudge = (
            "ZeRO-3 gathers every parameter over the network in every micro-batch: more bytes than stages send."
            if plan.zero_stage == 3
            else "explain(estimate(...)) says which single change makes it faster."
        )
        return not_yet(
            f"it fits, and is {slower:.0%} slower than the fastest",
            got=plan_name(found),
            nudge=nudge,
        )
    return _worry(case, found, answer)


def _worry(case: HalfTheCards, found: Estimate, answer: Mapping[str, Any]) -> Verdict:
    mine, theirs = slower_on_ethernet(case, found.plan), slower_on_ethernet(case, ZERO_3)
    nudge = "The same plan, estimated on case.on_ethernet and on case.cluster: the ratio of their steps."
    problem = (
        judge(
            answer["times on Ethernet"],
            mine,
            "your plan on Ethernet",
            relative=0.03,
            expected="a ratio",
            nudge=nudge,
            wrong={1 / mine: "Turn it over: how many times as long?", theirs: "That is ZeRO-3's."},
        )
        or judge(
            answer["ZeRO-3 on Ethernet"],
            theirs,
            "ZeRO-3 on Ethernet",
            relative=0.03,
            expected="a ratio",
            nudge=nudge,
            wrong={mine: "That is your plan's."},
        )
        or judge(
            answer["main worry"],
            WORRIES[0],
            "the main worry",
            expected="what your two ratios show",
            nudge="Which of these grows when only the network changes, and by how much?",
        )
    )
    least = par(case.model).step_seconds
    return problem or correct(
        plan_name(found), score=scored(found.step_seconds, least, "a step", format_seconds)
    )


def _gains(case: HalfTheCards, answer: Mapping[str, Any]) -> Gains:
    plan = answer["plan"]
    bare = estimate(case.model, case.cluster, replace(plan, offload="none"), case.batch)
    mine = estimate(case.model, case.cluster, plan, case.batch)
    return Gains(
        bare.peak.needed_bytes - mine.peak.needed_bytes,
        sum(axis_bytes(case.model, plan, case.batch)[0].values()),
    )


SHEET = Sheet(
    "Half of the cards",
    "advanced",
    "a model that does not fit, and the network's part in it",
    "32 GPUs and a model that does not fit: what do you choose, and what is the main worry?",
    ("15", "07", "11"),
    {
        "plan": plan_kind(),
        "times on Ethernet": number("a ratio"),
        "ZeRO-3 on Ethernet": number("a ratio"),
        "main worry": one_of(*WORRIES, what="a worry"),
    },
    data,
    _verdict,
    _gains,
)
