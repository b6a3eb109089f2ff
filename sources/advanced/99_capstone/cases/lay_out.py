"""Case "lay_out": 100B, 130B or 175B on 64 GPUs, with days and dollars as an interval."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.catalog import ModelShape
from utils.labs.cases import judge, scored
from utils.labs.kinds import number
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import (
    Batch,
    Cluster,
    Cost,
    Estimate,
    Plan,
    axis_bytes,
    cost,
    estimate,
    plan_name,
    search,
)
from utils.units import GB, format_seconds

from .plans import estimated, plan_kind, room
from .sheet import Gains, Sheet, interval

SLACK = 0.10
_RUNS = {
    1: ("175B", 96, 4, 2.45, 240e9),
    2: ("130B", 72, 8, 2.20, 200e9),
    3: ("100B", 56, 2, 1.80, 150e9),
}


@dataclass(frozen=True)
class Brief:
    """A model, its machines, its tokens.

    Attributes:
        model: Its shape.
        cluster: 8 nodes of 8 A100-80GB with a price.
        batch: The global batch.
        tokens: Of the whole run.
    """

    model: ModelShape
    cluster: Cluster
    batch: Batch
    tokens: float

    def __str__(self) -> str:
        ports = self.cluster.network_bytes_per_second / (25 * GB)
        return "\n".join(
            [
                f"Pre-train {self.model.name} ({self.model.parameter_count / 1e9:.0f}B parameters: {self.model.layers} layers of "
                f"{self.model.hidden}, {self.model.heads} heads) on {self.tokens / 1e9:.0f}B tokens.",
                f"64 A100-80GB, 8 nodes of 8, {ports:.0f} network ports of 200 Gb/s a node, ${self.cluster.usd_per_gpu_hour} a GPU hour; "
                f"{self.batch.sequences} sequences of {self.batch.sequence_length} tokens a step.",
                "Give a Plan that trains every parameter and fits with headroom, at most 10% slower than the fastest;",
                "the days as an interval (low, high) with failures in it, and the dollars. All of it is predicted.",
            ]
        )


@functools.cache
def data(seed: int) -> Brief:
    """The brief of a seed."""
    name, layers, ports, usd, tokens = _RUNS[seed]
    model = ModelShape(
        name=name,
        family="gpt",
        layers=layers,
        hidden=12_288,
        heads=96,
        feedforward=49_152,
        vocabulary=51_200,
        max_sequence=2048,
        positions="learned",
        tied=True,
    )
    cluster = Cluster(
        gpu="A100-80GB", nodes=8, network_bytes_per_second=ports * 25 * GB, usd_per_gpu_hour=usd
    )
    return Brief(model, cluster, Batch(sequences=1536, sequence_length=2048), tokens)


@functools.cache
def par(name: str) -> Estimate:
    """The fastest plan with headroom."""
    case = next(data(seed) for seed, run in _RUNS.items() if run[0] == name)
    found = search(case.model, case.cluster, case.batch).fastest
    assert found is not None, "each of these models fits 64 GPUs"
    return found


def _verdict(case: Brief, answer: Mapping[str, Any]) -> Verdict:
    found = _plan(case, answer["plan"])
    return found if isinstance(found, Verdict) else _bill(case, found, answer)


def _plan(case: Brief, plan: Plan) -> Estimate | Verdict:
    if plan.lora is not None or plan.conventions.name != "megatron":
        return not_yet("every parameter trains, and framework is left as it is")
    found = estimated(case.model, case.cluster, plan, case.batch, "the plan")
    if isinstance(found, Verdict):
        ranks = plan.ranks
        if ranks == 512:
            return not_yet(
                "the plan uses 512 GPUs, and there are 64",
                got=f"tp {plan.tp} x pp {plan.pp} x dp {plan.dp}",
                nudge="TP x PP x DP are all the GPUs. What is left for DP?",
            )
        return found
    nudge = "States: 18 bytes a parameter over TP x PP. Activations: which of TP, stages and micro-batch shrink them?"
    if problem := room(found, "the plan", nudge):
        return problem
    slower = found.step_seconds / par(case.model.name).step_seconds - 1
    if slower > SLACK:
        nudge = (
            "Full recomputation costs a third of the compute. Is its memory needed?"
            if plan.recompute == "full"
            else "Gathers for every micro-batch, on this network?"
            if plan.zero_stage == 3
            else "explain(estimate(...)) says which single change makes it faster."
        )
        return not_yet(
            f"it fits, and is {slower:.0%} slower than the fastest",
            got=plan_name(found),
            nudge=nudge,
        )
    return found


def bill(case: Brief, found: Estimate) -> Cost:
    """Days and dollars with failures in them."""
    return cost(found, case.tokens)


def _bill(case: Brief, found: Estimate, answer: Mapping[str, Any]) -> Verdict:
    right, (low, high) = bill(case, found), answer["days"]
    if high <= 1.001 * low:
        return not_yet(
            "the days",
            got=f"{low:.0f} to {high:.0f}",
            expected="an interval, low and high",
            nudge="One number says nothing of the planner's error and of failures. What does cost(...) give?",
        )
    ideal = case.tokens / found.tokens_per_second / 86_400
    problem = judge(
        (low, high),
        right.days_interval,
        "the days",
        relative=0.03,
        expected="the interval of 80% of runs",
        nudge="cost(estimate(...), tokens).days_interval holds the error of step times and the failures.",
    )
    problem = problem or judge(
        answer["usd"],
        right.usd,
        "the dollars",
        relative=0.03,
        expected="dollars of the whole run",
        wrong={
            ideal
            * 24
            * 64
            * right.usd_per_gpu_hour: "Failures take their share of the hours, and you pay for them.",
            right.usd / 64: "That is one GPU. You rent 64.",
        },
        nudge="GPU hours, times the price of the brief.",
    )
    score = scored(found.step_seconds, par(case.model.name).step_seconds, "a step", format_seconds)
    return problem or correct(plan_name(found), score=f"{score}; ${right.usd / 1e6:.2f}M")


def _gains(case: Brief, answer: Mapping[str, Any]) -> Gains:
    found = estimate(case.model, case.cluster, answer["plan"], case.batch)
    whole = estimate(case.model, case.cluster, Plan(dp=64), case.batch).peak.needed_bytes
    sent = sum(axis_bytes(case.model, found.plan, case.batch)[0].values())
    return Gains(whole - found.peak.needed_bytes, sent, bill(case, found).usd)


SHEET = Sheet(
    "Lay it out on 64 GPUs",
    "advanced",
    "a 3D layout with its days and dollars",
    "175B on 64 GPUs: lay it out.",
    ("14", "15"),
    {
        "plan": plan_kind(),
        "days": interval("two numbers of days: low, high"),
        "usd": number("a number of dollars"),
    },
    data,
    _verdict,
    _gains,
)
