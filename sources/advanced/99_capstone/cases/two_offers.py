"""Case "two_offers": 13B on A100 or on cheaper A10; a matrix, a deadline, and a premise."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import judge, scored
from utils.labs.kinds import keys, number, one_of, whole
from utils.labs.verdict import Verdict, correct
from utils.planner import Batch, Cluster, Estimate, Plan, axis_bytes, cost, estimate
from utils.units import GB

from .sheet import Gains, Sheet

MODEL, BATCH = "llama-2-13b", Batch(sequences=2048, sequence_length=4096)
NODE_COUNTS = (1, 2, 4, 8, 16, 32)
OFFERS = ("A100", "A10 plain", "A10 sharded")
NEITHER = "none of them"
_CLAIMED = {"A100": 0.45, "A10 plain": 0.38, "A10 sharded": 0.38}
# The slow side of the interval decides in each: the middle would give an offer fewer nodes.
_RUNS = {  # tokens, days, $ of an A100 hour and of an A10 hour, GB/s that leave an A10 node
    1: (260e9, 90, 2.79, 1.29, 12.5),
    2: (60e9, 40, 3.40, 0.22, 50.0),
    3: (1000e9, 22, 2.20, 1.01, 3.125),
}


@dataclass(frozen=True)
class Offers:
    """Three offers for 13B.

    Attributes:
        tokens, days: What is to be trained, until when.
        usd: Of a GPU hour, by offer.
        network: Bytes per second that leave a node, by offer.
    """

    tokens: float
    days: int
    usd: Mapping[str, float]
    network: Mapping[str, float]

    def cluster(self, offer: str, nodes: int) -> Cluster:
        """So many nodes of an offer."""
        gpu = "A100-80GB" if offer == "A100" else "A10"
        return Cluster(
            gpu=gpu,
            nodes=nodes,
            network_bytes_per_second=self.network[offer],
            usd_per_gpu_hour=self.usd[offer],
        )

    def plan(self, offer: str, nodes: int) -> Plan:
        """What the offer says it would run there."""
        if offer == "A100":
            return Plan(tp=4, pp=2, dp=nodes, sequence_parallel=True, zero_stage=1)
        stage = 0 if offer == "A10 plain" else 3
        return Plan(
            dp=8 * nodes,
            zero_stage=stage,
            recompute="full",
            framework="deepspeed",
            micro_batch=1 if stage == 0 else 4,
        )

    def estimate(self, offer: str, nodes: int) -> Estimate:
        """What the planner predicts of it."""
        return estimate(MODEL, self.cluster(offer, nodes), self.plan(offer, nodes), BATCH)

    def __str__(self) -> str:
        rows = [
            f"  {offer:<12} ${self.usd[offer]:.2f} a GPU hour, {self.network[offer] / GB:.1f} GB/s out of a node of 8; claimed MFU "
            f"{_CLAIMED[offer]:.0%}"
            for offer in OFFERS
        ]
        return "\n".join(
            [
                f"{MODEL}, {self.tokens / 1e9:.0f}B tokens, in {self.days} days. Three offers, each of {', '.join(map(str, NODE_COUNTS))} nodes:",
                *rows,
                "A100: TP 4, PP 2, ZeRO-1 over the rest. A10 plain: data parallelism and full recomputation. A10 sharded: ZeRO-3,",
                "full recomputation, micro-batch 4. case.estimate(offer, nodes) predicts one. The matrix: for each offer the fewest nodes that fit",
                "with headroom and are done in time on the slow side of the interval of days (0 where none are), and the dollars then",
                '(0 where none are); and your choice, the cheapest of them, or "none of them".',
            ]
        )


@functools.cache
def data(seed: int) -> Offers:
    """The offers of a seed."""
    tokens, days, a100, a10, out = _RUNS[seed]
    return Offers(
        tokens,
        days,
        {"A100": a100, "A10 plain": a10, "A10 sharded": a10},
        {"A100": 200 * GB, "A10 plain": out * GB, "A10 sharded": out * GB},
    )


def row(case: Offers, offer: str) -> tuple[int, float]:
    """The fewest nodes of an offer that fit and meet the deadline, and the dollars; 0 and 0 without."""
    for nodes in NODE_COUNTS:
        found = case.estimate(offer, nodes)
        if (
            found.fits
            and not found.tight
            and cost(found, case.tokens).days_interval[1] <= case.days
        ):
            return nodes, cost(found, case.tokens).usd
    return 0, 0.0


def choice(case: Offers) -> str:
    """The cheapest offer that is done in time."""
    priced = {offer: row(case, offer)[1] for offer in OFFERS}
    able = {offer: usd for offer, usd in priced.items() if usd}
    return min(able, key=lambda offer: able[offer]) if able else NEITHER


def _verdict(case: Offers, answer: Mapping[str, Any]) -> Verdict:
    for offer in OFFERS:
        if problem := _wrong_row(case, offer, answer[offer]):
            return problem
    right = choice(case)
    problem = judge(
        answer["choice"],
        right,
        "the choice",
        expected="the cheapest that is done in time",
        nudge="Compare the dollars of the rows that have any. A price of an hour is no price of a run.",
    )
    usd = row(case, right)[1] if right != NEITHER else 0.0
    return problem or correct(
        f"{right}, by fit, deadline and dollars",
        score=scored(usd, usd, "for the run", "${:,.0f}".format),
    )


def _wrong_row(case: Offers, offer: str, mine: Mapping[str, Any]) -> Verdict | None:
    nodes, usd = row(case, offer)
    one = case.estimate(offer, NODE_COUNTS[0])
    claimed = _at_claimed_mfu(case, offer)
    holds = f"{one.peak.state_bytes / GB:.0f} GB of states lie on each card"
    never = (
        f"{holds}: plain data parallelism splits none of them, on any number of nodes."
        if offer == "A10 plain"
        else "No number of nodes in the list is done in time on the slow side."
    )
    wrong = (
        {claimed: "That is the claimed MFU. What does the planner say of this plan on these links?"}
        if claimed != nodes
        else {}
    )
    problem = judge(
        mine["nodes"],
        nodes,
        f"{offer}: the nodes",
        wrong=wrong if nodes else {},
        expected="a number of nodes, or 0",
        nudge=never
        if not nodes
        else "Fits with headroom, and the slow side, cost(...).days_interval[1], within the deadline.",
    )
    return problem or judge(
        mine["usd"],
        usd,
        f"{offer}: the dollars",
        relative=0.03,
        expected="dollars of the run",
        nudge="cost(case.estimate(offer, nodes), case.tokens).usd",
    )


def _at_claimed_mfu(case: Offers, offer: str) -> int:
    """Nodes by 6 N D over the claimed speed, whatever fits."""
    peak = case.cluster(offer, 1).device.peak_flops_per_second("bf16")
    a_node = 8 * peak * _CLAIMED[offer] * case.days * 86_400
    return next((n for n in NODE_COUNTS if n * a_node >= 6 * 13.0e9 * case.tokens), 0)


def _gains(case: Offers, answer: Mapping[str, Any]) -> Gains:
    right = choice(case)
    if right == NEITHER:
        return Gains()
    nodes, usd = row(case, right)
    found = case.estimate(right, nodes)
    plain = case.estimate("A10 plain", nodes)
    sent = sum(axis_bytes(MODEL, found.plan, BATCH)[0].values())
    return Gains(plain.peak.needed_bytes - found.peak.needed_bytes, sent, usd)


SHEET = Sheet(
    "A100 or A10",
    "advanced",
    "a decision matrix with a deadline in it",
    "13B: A100s at 45% MFU with 3D parallelism, or cheaper A10s at 38% with data parallelism and checkpointing?",
    ("17", "15"),
    {
        **{
            offer: keys({"nodes": whole("a number of nodes"), "usd": number("a number of dollars")})
            for offer in OFFERS
        },
        "choice": one_of(*OFFERS, NEITHER, what="an offer"),
    },
    data,
    _verdict,
    _gains,
)
