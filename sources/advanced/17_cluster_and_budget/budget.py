"""Checks of lesson and lab 17's second part, the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from utils.catalog import Price, device, price
from utils.labs.cases import NOT_FINITE, Question, judge, scored, takes
from utils.labs.kinds import Kind, NotYet, function, keys, number, one_of, or_none, whole
from utils.labs.verdict import Verdict, correct, not_yet

from .matrix import DEADLINE_DAYS, GOODPUT, KINDS, LINES, PARAMETERS, TOKENS
from .offers import USABLE, Offer, Purchase, cheapest, purchase
from .scaling import REPLICATION, UNROUNDED, ScalingLaw

SLACK = 0.01
training_share = Question(
    "Lesson 17: 6 N D of training and 2 N D of serving.",
    number("a share from 0 to 1"),
    right=0.75,
    within=0.005,
    wrong={
        0.5: "A token in training costs three times one in service: forward, and backward twice that.",
        0.25: "That is the share of serving.",
        75: "Write a share from 0 to 1.",
    },
    nudge="6 N D of training and 2 N D of serving.",
    note="6 / (6 + 2)",
    expected="a share from 0 to 1",
)


@dataclass(frozen=True)
class Market:
    """One call of the learner's search: what is asked, and what is on offer."""

    says: str
    law: ScalingLaw
    loss: float
    days: float
    offers: tuple[Offer, ...]
    served_tokens: float = 0.0

    def best(self) -> Purchase | None:
        return cheapest(self.law, self.loss, self.days, self.offers, self.served_tokens)


def lab_offers() -> tuple[Offer, ...]:
    """What the lab searches: three cards at dated prices, at the MFU of lesson 17."""
    return (
        _offer("A100", price("A100-80GB", "Lambda"), "A100-80GB", 0.45, most_nodes=16),
        _offer("A10", price("A10", "Lambda"), "A10", 0.38, most_nodes=48, lost_per_doubling=0.06),
        _offer("H100", price("H100", "Nebius"), "H100", 0.40, most_nodes=4),
    )


def _offer(name: str, row: Price, card: str, mfu: float, **more: Any) -> Offer:
    gpu = device(card)
    return Offer(
        name=name,
        usd_per_gpu_hour=row.usd_per_gpu_hour,
        as_of=row.as_of,
        flops_per_second=mfu * gpu.peak_flops_per_second("bf16"),
        memory_bytes=float(gpu.memory_bytes),
        **more,
    )


def _markets() -> list[Market]:
    a100, a10, h100 = lab_offers()
    loss = REPLICATION.loss(7e9, 140e9)
    free = replace(a10, usd_per_gpu_hour=a10.usd_per_gpu_hour / 4)
    slow = replace(a100, name="slow", usd_per_gpu_hour=0.9, flops_per_second=3e13, most_nodes=8)
    large = REPLICATION.loss(30e9, 600e9)
    return [
        Market(
            "7B's loss in a year, by another law",
            UNROUNDED,
            UNROUNDED.loss(7e9, 140e9),
            365,
            (a100,),
        ),
        Market("the same loss in 5 days, three kinds", REPLICATION, loss, 5, (a100, a10, h100)),
        Market("the same in 60 days, one cheap by the hour", REPLICATION, loss, 60, (slow, h100)),
        Market(
            "the same in 6 days, of two kinds", REPLICATION, loss, 6, (a100, h100)
        ),  # 4 of 4 H100
        Market("and 5T tokens served", REPLICATION, loss, 30, (a100, a10, h100), 5e12),
        Market("30B's loss in 4 years on cards of 24 GB", REPLICATION, large, 1460, (free,)),
        Market("30B's loss in a day", REPLICATION, large, 1, (a100, h100)),
        Market("a loss at the law's floor", REPLICATION, REPLICATION.e, 365, (a100,)),
        Market("a loss below the law's floor", REPLICATION, REPLICATION.e - 0.01, 365, (a100,)),
    ]


_WAY: Kind = or_none(
    keys(
        {
            "offer": one_of("A100", "A10", "H100", "slow", what="the name of an offer"),
            "nodes": whole("a number of nodes"),
            "parameters": number("a number of parameters"),
        }
    )
)


@takes(function())
def cheapest_run(answer: Callable[..., Any]) -> Verdict:
    """Exercise: the cheapest way to a loss by a deadline, beside all ways tried."""
    spent = par = 0.0
    for market in _markets():
        found, best = _chosen(answer, market), market.best()
        if found is None or best is None:
            if found is not best:
                return _one_is_none(found, market)
            continue
        if verdict := _not_allowed(found, market) or _too_dear(found, best, market):
            return verdict
        spent, par = spent + found.usd, par + best.usd
    return correct(
        "in time, in memory, and at the least cost", score=scored(spent, par, "", "${:,.0f}".format)
    )


def _chosen(answer: Callable[..., Any], market: Market) -> Purchase | None:
    names = {offer.name: offer for offer in market.offers}
    asked = (market.law, market.loss, market.days, list(market.offers), market.served_tokens)
    told = _WAY.returned(answer(*asked))
    if told is None:
        return None
    offer, nodes = names.get(told["offer"]), told["nodes"]
    if offer is None or not 1 <= nodes <= offer.most_nodes:
        raise NotYet(
            not_yet(
                market.says,
                got=f"{nodes} nodes of {told['offer']}",
                nudge="Take one of the offers that were passed, with 1 to most_nodes nodes.",
            )
        )
    if not math.isfinite(told["parameters"]):
        raise NotYet(not_yet(market.says, got=f"{told['parameters']} parameters", nudge=NOT_FINITE))
    try:
        return purchase(
            market.law, market.loss, offer, nodes, told["parameters"], market.served_tokens
        )
    except ValueError as sentence:
        nudge = (
            "A model needs a size at which the law can reach the loss: law.least_parameters(loss)."
        )
        raise NotYet(not_yet(f"{market.says}: {sentence}", nudge=nudge)) from None


def _one_is_none(found: Purchase | None, market: Market) -> Verdict:
    if found is None:
        return not_yet(
            market.says,
            expected="a way; there is one",
            got="None",
            nudge="Try other sizes of model: a smaller one needs less memory and more tokens.",
        )
    return _not_allowed(found, market) or not_yet(market.says, expected="None", got=_words(found))


def _not_allowed(found: Purchase, market: Market) -> Verdict | None:
    if not found.offer.holds(found.nodes, found.parameters):
        states = 16 * found.parameters / 1e9
        there = USABLE * found.nodes * found.offer.gpus_per_node * found.offer.memory_bytes / 1e9
        return not_yet(
            f"{market.says}: states of {states:,.0f} GB, and {there:,.0f} GB may be used",
            got=_words(found),
            nudge="16 bytes a parameter must fit: offer.holds(nodes, parameters).",
        )
    if found.days > market.days * (1 + 1e-9):
        return not_yet(
            f"{market.says}: it takes {found.days:,.1f} days, the deadline is {market.days:,.0f}",
            got=_words(found),
            nudge="The deadline is a limit, not a price: strike out what is late first.",
        )
    return None


def _too_dear(found: Purchase, best: Purchase, market: Market) -> Verdict | None:
    more = found.usd / best.usd - 1
    if more <= SLACK:
        return None
    return not_yet(
        f"{market.says}: {more:.1%} dearer than need be",
        got=_words(found),
        expected=f"at most {SLACK:.0%} above ${best.usd:,.0f}",
        nudge=_why_dear(found, best, market),
    )


def _why_dear(found: Purchase, best: Purchase, market: Market) -> str:
    if best.nodes == best.offer.most_nodes and found.offer is not best.offer:
        return (
            f"All {best.nodes} nodes of {best.offer.name} would do it. Are as many tried as there are: does "
            "range end at most_nodes, or one before?"
        )
    hourly = min(offer.usd_per_gpu_hour for offer in market.offers)
    if found.offer is not best.offer:
        if found.offer.usd_per_gpu_hour == hourly:
            return (
                "The cheapest hour is not the cheapest FLOP: divide the price by flops_per_second."
            )
        return "Another offer does it for less. Are all of them tried, each at its best nodes and size?"
    alone = market.law.cheapest_parameters(market.loss)
    if market.served_tokens and abs(found.parameters / alone - 1) < 0.05:
        return "That size is best for training alone. Who pays for the tokens that it serves?"
    if abs(found.tokens / found.parameters / 20 - 1) < 0.05:
        return "20 tokens a parameter is a rule of thumb. The law that you were given has its own ratio."
    if found.nodes > best.nodes:
        return "More nodes lose speed at each doubling. How few are still in time?"
    return "Which size costs least? Each needs its own tokens: law.tokens_for(loss, parameters)."


def _words(found: Purchase) -> str:
    return (
        f"{found.nodes} nodes of {found.offer.name}, {found.parameters / 1e9:.2f}B on "
        f"{found.tokens / 1e9:,.0f}B tokens: {found.days:,.1f} days, ${found.usd:,.0f}"
    )


_FAULTS: Kind = keys(
    {str(n): one_of(*KINDS, what="a kind of mistake") for n in range(1, len(LINES) + 1)}
)
_PAIR: Kind = keys({"A100": number(), "H100": number()})


def right_bill(card: str) -> tuple[float, float]:
    """Days and dollars of the repaired matrix, for "A100" or "H100"."""
    gpus, gpu, share, row = {
        "A100": (256, "A100-80GB", 0.54 * 3 / 4, price("A100-80GB", "Lambda")),
        "H100": (128, "H100", 0.40, price("H100", "Nebius")),
    }[card]
    speed = gpus * device(gpu).peak_flops_per_second("bf16") * share
    days = 6 * PARAMETERS * TOKENS / speed / 86_400 / GOODPUT
    return days, days * 24 * gpus * row.usd_per_gpu_hour


@takes(keys({"lines": _FAULTS, "days": _PAIR, "usd": _PAIR, "winner": one_of("A100", "H100")}))
def matrix_reviewed(answer: dict[str, Any]) -> Verdict:
    """Exercise: a decision matrix with mistakes, found and repaired."""
    return (
        _wrong_lines(answer["lines"])
        or _wrong_days(answer["days"])
        or _wrong_usd(answer["usd"])
        or judge(
            answer["winner"],
            "H100",
            "the winner",
            expected="the one that is left",
            nudge=f"Days after the repair, and a deadline of {DEADLINE_DAYS}: who is out?",
        )
        or correct("six lines mended, and the other offer wins")
    )


def _wrong_lines(lines: Mapping[str, str]) -> Verdict | None:
    for number_, line in enumerate(LINES, 1):
        told = lines[str(number_)]
        if told == line.kind:
            continue
        where = f"line {number_}, {line.text!r}"
        if line.kind == "right":
            return not_yet(
                where, got=told, nudge="Do that sum again, with the source beside it: it holds."
            )
        if told == "right":
            return not_yet(where, got=told, nudge=line.hint)
        return not_yet(
            where, got=told, nudge=f"Something is wrong with it, and not that. {line.hint}"
        )
    return None


def _wrong_days(days: Mapping[str, float]) -> Verdict | None:
    for card in ("A100", "H100"):
        right = right_bill(card)[0]
        wrong = {
            right / 3: "That is the forward pass alone.",
            right * GOODPUT: "Failures and saves leave 95% of the time.",
            right * 3 / 4: "The model does not need what is recomputed: 3/4 of that MFU.",
            right / 2: "Half the peak: 624 TFLOP/s are with sparsity.",
        }
        if verdict := judge(
            days[card],
            right,
            f"days of {card}",
            wrong=wrong,
            relative=0.01,
            expected="days",
            nudge="6 N D over GPUs x peak x MFU, over 0.95.",
        ):
            return verdict
    return None


def _wrong_usd(usd: Mapping[str, float]) -> Verdict | None:
    for card, per_hour in (
        ("A100", "price('A100-80GB', 'Lambda')"),
        ("H100", "price('H100', 'Nebius')"),
    ):
        right = right_bill(card)[1]
        wrong = {
            right / 24: "A day has 24 hours.",
            right / price("H100", "Nebius").usd_per_gpu_hour * 12: "That is the slide's price.",
        }
        if verdict := judge(
            usd[card],
            right,
            f"dollars of {card}",
            wrong=wrong,
            relative=0.01,
            expected="dollars",
            nudge=f"GPUs x hours x {per_hour}.",
        ):
            return verdict
    return None
