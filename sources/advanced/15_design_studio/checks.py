"""Checks of lesson and lab 15, "The design studio"; the planner grades."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from utils.catalog import ModelShape, device, model_shape, price
from utils.labs.cases import Question, judge, scored, takes
from utils.labs.kinds import flag, function, instance, keys, number, one_of, several, text
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.planner import (
    Batch,
    Cluster,
    Estimate,
    Plan,
    SearchSpace,
    estimate,
    explain,
    plan_name,
    search,
    why_it_does_not_fit,
)
from utils.planner.neighbours import largest_category
from utils.units import GB, format_bytes, format_seconds

SLACK = 0.10  # what the lesson's review allows
MODEL = "gpt-3-175b"
BATCH = Batch(sequences=1536, sequence_length=2048)
OOM_PLAN = Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2)
TO_FIX = Plan(tp=4, pp=16, recompute="none")
TOKENS_PER_PARAMETER, FLOP_PER_TOKEN = 20, 6  # Hoffmann et al. 2022: 70B parameters, 1.4T tokens


HUNDRED_B = ModelShape(
    name="100B",
    family="gpt",
    layers=56,
    hidden=12_288,
    heads=96,
    feedforward=49_152,
    vocabulary=51_200,
    max_sequence=2048,
    positions="learned",
    tied=True,
)
WITH_HOST = SearchSpace(offload=("none", "optimizer"))


def small_cards() -> Cluster:
    """64 A100-40GB: 8 nodes of 8."""
    return Cluster(gpu="A100-40GB", nodes=8)


def the_cluster() -> Cluster:
    """64 A100-80GB: 8 nodes of 8."""
    return Cluster(gpu="A100-80GB", nodes=8)


_STATES_GB = 18 * 130 / 64
gb_per_gpu = Question(
    "Lesson 15: 18 bytes per parameter of 130B over 64 GPUs.",
    number("a number of GB"),
    right=_STATES_GB,
    relative=0.02,
    wrong={
        16 * 130 / 64: "That is 16 bytes per parameter. The gradients are fp32 here.",
        18 * 130: "That is all of it. 64 GPUs share it.",
        2 * 130 / 64: "Those are the weights alone.",
    },
    nudge="Bytes per parameter, times parameters, over GPUs.",
    note=f"18 x 130 / 64 = {_STATES_GB:.1f} GB",
    expected="GB of states on each GPU",
)


_HIGHEST_USD = 1e6 / (6 * 131e9 * 300e9 / (312e12 * 0.53) / 3600)
highest_usd = Question(
    "Lesson 15: the price at which 64 A100 at 53% MFU spend $1,000,000 on 130B and 300B tokens.",
    number("a number of dollars"),
    right=_HIGHEST_USD,
    relative=0.02,
    wrong={
        _HIGHEST_USD / 0.53: "That is the data sheet's whole speed. The run uses 53% of it.",
        64 * _HIGHEST_USD: "That is the price of all 64 for an hour.",
        _HIGHEST_USD * 24: "That is the price of a day.",
        3 * _HIGHEST_USD: "Forward takes 2 FLOP a parameter and token, backward 4: 6 in all.",
    },
    nudge="6 N D over (FLOP/s x MFU x 3600) are GPU hours. Dollars over hours are the price.",
    note=f"$1,000,000 over {1e6 / _HIGHEST_USD:,.0f} GPU hours = ${_HIGHEST_USD:.2f}: less than the $2.79 asked",
    expected="dollars a GPU hour",
)


@takes(instance(Plan, "a Plan(...)"))
def plan_small_cards(answer: Plan) -> Verdict:
    """Exercise 1: a plan that fits with headroom, within 10% of the fastest that does."""
    try:
        found = estimate(HUNDRED_B, small_cards(), answer, BATCH)
    except ValueError as sentence:
        return not_yet(str(sentence), nudge="dp * tp * pp * cp must be 64, and all must divide.")
    if verdict := _other_work(answer):
        return verdict
    if not found.fits:
        nudge = (
            "Which choice makes that category smaller: a split, a smaller micro-batch, less kept?"
        )
        return not_yet(why_it_does_not_fit(found), nudge=nudge)
    gpu, held = found.cluster.device, found.peak.device_bytes
    if found.tight:
        return not_yet(
            f"it fits, and with the gaps between blocks it holds {held / gpu.memory_bytes:.0%} of the "
            "card: within the allocator's reach",
            expected="headroom",
            got=plan_name(found),
            nudge="Near the limit the allocator frees and searches at every step. What on the card is "
            "needed only once a step?",
        )
    fastest = search(HUNDRED_B, small_cards(), BATCH, space=WITH_HOST).fastest
    assert fastest is not None
    slower = found.step_seconds / fastest.step_seconds - 1
    if slower > SLACK:
        return not_yet(
            f"it fits, and is {slower:.1%} slower than the fastest plan",
            expected=f"at most {SLACK:.0%}",
            got=plan_name(found),
            nudge=_speed_nudge(answer),
        )
    needed = format_bytes(found.peak.needed_bytes)
    score = f"{format_seconds(found.step_seconds)} a step, {slower:.1%} off the fastest, {needed}"
    return correct(plan_name(found), score=score)


def _other_work(plan: Plan) -> Verdict | None:
    """The verdict on a plan that fits by doing less, or by counting bytes in another way."""
    if plan.lora is not None:
        nudge = "Which plan trains all 175 billion parameters? Leave lora out."
        return not_yet("with lora= it trains adapters alone, on a frozen model", nudge=nudge)
    if plan.conventions != TO_FIX.conventions:
        nudge = "Leave framework out: a layout moves bytes, this changes how they are counted."
        return not_yet(
            "with framework= other books are kept", expected=TO_FIX.conventions.name, nudge=nudge
        )
    return None


def _on_64(plan: Plan) -> Estimate:
    return estimate(model_shape(MODEL), the_cluster(), plan, BATCH)


def _speed_nudge(plan: Plan) -> str:
    if plan.recompute == "full":
        return "Full recomputation costs a third of the time. What else can leave the card?"
    if plan.tp > 8:
        return "Tensor parallelism leaves the node. Keep it on NVLink."
    if plan.tp > 1 and not plan.sequence_parallel:
        return "sequence_parallel splits what TP leaves whole, at no cost in traffic."
    if plan.offload != "none" and plan.dp == 1:
        return "The card has room now. Does it hold larger pieces of the model, in two replicas?"
    return "Ask explain(...) which single change makes it faster."


@takes(
    keys(
        {
            "fullest stage": number("the number of a stage"),
            "largest category": text(),
            "missing GiB": number("a number of GiB"),
        }
    )
)
def explain_oom(answer: dict[str, Any]) -> Verdict:
    """Exercise 2: which stage overflows, with which category, and by how much."""
    found = _on_64(OOM_PLAN)
    index, name, right = (
        found.peak.stage.index,
        largest_category(found.peak)[0],
        found.missing_bytes / 2**30,
    )
    where = "Stage i holds min(m, p - i) micro-batches, so which holds most? Stages count from 0."
    all_of_it = {
        found.peak.needed_bytes / 2**30: "That is all it needs. How much of it does not fit?"
    }
    lacks = "What the GPU lacks, in GiB: needed less usable."
    return (
        judge(answer["fullest stage"], index, "the stage", expected="its number", nudge=where)
        or _wrong_category(answer["largest category"], found)
        or judge(
            answer["missing GiB"],
            right,
            "the missing memory",
            expected="GiB",
            within=0.5,
            wrong=all_of_it,
            nudge=lacks,
        )
        or correct(
            f"stage {index}: {format_bytes(largest_category(found.peak)[1])} of {name}, "
            f"{right:.1f} GiB too much"
        )
    )


def _wrong_category(category: str, found: Estimate) -> Verdict | None:
    if category == largest_category(found.peak)[0]:
        return None
    by_name: dict[str, float] = {**found.peak.bytes_by_category}
    second = by_name.get(category)
    held = f"{format_bytes(second)} there" if second is not None else "no category"
    nudge = "Look at the tallest part of that stage's bar. What grew with the micro-batch?"
    return not_yet("the category", got=f"{shown(category)}: {held}", nudge=nudge)


@takes(instance(Plan, "a Plan: replace(broken, field=value)"))
def fix_by_one_change(answer: Plan) -> Verdict:
    """Exercise 3: one field changed, it fits, and no other single change is much faster."""
    changed = [f.name for f in fields(Plan) if getattr(answer, f.name) != getattr(TO_FIX, f.name)]
    if len(changed) != 1:
        got = ", ".join(changed) or "nothing changed"
        return not_yet(
            expected="one field changed", got=got, nudge="Undo all but the one you need."
        )
    if verdict := _other_work(answer):
        return verdict
    try:
        found = _on_64(answer)
    except ValueError as sentence:
        return not_yet(str(sentence))
    if not found.fits:
        nudge = "What is kept whole on every TP rank, although TP could split it?"
        return not_yet(why_it_does_not_fit(found), nudge=nudge)
    fitting = [
        row.estimate for row in explain(_on_64(TO_FIX)) if row.estimate and row.estimate.fits
    ]
    least = min(row.step_seconds for row in fitting)
    slower = found.step_seconds / least - 1
    if slower > 0.01:
        return not_yet(
            f"{changed[0]} makes it fit, {slower:.1%} slower than another single change",
            nudge="What costs neither arithmetic nor the way to the host?",
        )
    return correct(changed[0], score=scored(found.step_seconds, least, "a step", format_seconds))


@takes(function())
def token_budget(answer: Callable[[float, float, float, float], Any]) -> Verdict:
    """Exercise 4: parameters and tokens that a budget buys, at 20 tokens per parameter."""
    pair = several(number(), 2, "two numbers: parameters, tokens")
    for usd, hourly, peak, mfu in [(1e6, 2.79, 312e12, 0.5), (5e4, 3.99, 989e12, 0.4)]:
        parameters, tokens = pair.returned(answer(usd, hourly, peak, mfu))
        flop = usd / hourly * 3600 * peak * mfu
        right = (flop / (FLOP_PER_TOKEN * TOKENS_PER_PARAMETER)) ** 0.5
        says = f"for ${usd:,.0f} at ${hourly} an hour"
        verdict = judge(
            parameters,
            right,
            f"parameters {says}",
            relative=0.01,
            expected=f"{right:.4g}",
            wrong={right * share: nudge for share, nudge in _slips(mfu).items()},
            nudge="FLOP = dollars / price * 3600 * peak * MFU; then N = sqrt(FLOP / 120).",
        ) or judge(
            tokens,
            TOKENS_PER_PARAMETER * right,
            f"tokens {says}",
            relative=0.01,
            expected=f"{TOKENS_PER_PARAMETER * right:.4g}",
            nudge="Tokens are 20 times the parameters.",
        )
        if verdict:
            return verdict
    return correct("C = 6 N D with D = 20 N")


def _slips(mfu: float) -> dict[float, str]:
    """By how much too many parameters each known mistake gives."""
    return {
        mfu**-0.5: "GPUs do not run at peak: where is the MFU?",
        60**-1: "An hour has 3600 seconds.",
        3**0.5: "Forward is 2 FLOP per parameter and token, backward twice that: 6 in all.",
        20**0.5: "C = 6 N D, and D is 20 N: N = sqrt(C / 120).",
    }


@takes(
    keys(
        {
            "bill": function(),
            "an A10 holds the states": flag(),
            "choice": one_of("A100", "A10", "A100-80GB"),
        }
    )
)
def two_cards(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: A100 or A10 for 13B under a deadline; the premise first."""
    gigabytes = _a10_alone().peak.state_bytes / GB
    premise = f"Plain DP keeps {gigabytes:.0f} GB of states on every card of 24."
    slow_link = "Compare dollars for the same FLOP, and ask what must be sharded over PCIe."
    choice = answer["choice"].removesuffix("-80GB")
    return (
        _wrong_bill(answer["bill"])
        or judge(
            answer["an A10 holds the states"],
            False,
            "the premise",
            expected="a look at the states",
            nudge=premise,
        )
        or judge(choice, "A100", "the choice", expected="the cheaper one that can", nudge=slow_link)
        or correct("A10: more cards, more dollars, and plain DP does not even start")
    )


def _wrong_bill(bill: Callable[..., Any]) -> Verdict | None:
    pair = several(number(), 2, "two numbers: GPUs, dollars")
    whole_cards = (
        "GPUs: 6 N D FLOP over (peak * MFU * seconds), rounded up. Half a card meets no deadline."
    )
    dollars = (
        "GPUs: 6 N D FLOP over (peak * MFU * seconds), rounded up. Dollars: GPUs * hours * price."
    )
    for card, mfu in (("A100-80GB", 0.45), ("A10", 0.38)):
        peak, hourly = device(card).peak_flops_per_second("bf16"), _hourly(card)
        gpus, usd = pair.returned(bill(peak, mfu, hourly, 13e9, 260e9, 30))
        right, cost = _bill(peak, mfu, hourly)
        verdict = judge(
            gpus, right, f"the GPUs for {card}", wrong={right - 1: whole_cards}, nudge=dollars
        )
        verdict = verdict or judge(
            usd,
            cost,
            f"the dollars for {card}",
            relative=0.02,
            expected=f"${cost:,.0f}",
            nudge=dollars,
        )
        if verdict:
            return verdict
    return None


def _hourly(card: str) -> float:
    return price(card, "Lambda").usd_per_gpu_hour


def _bill(peak: float, mfu: float, hourly: float) -> tuple[int, float]:
    count = -int(-(6 * 13e9 * 260e9) // (peak * mfu * 30 * 86_400))
    return count, count * 30 * 24 * hourly


def _a10_alone() -> Estimate:
    model: ModelShape = model_shape("llama-2-13b")
    machines = Cluster(gpu="A10", nodes=1)
    plan = Plan(dp=8, recompute="full", framework="zero-paper")
    return estimate(model, machines, plan, Batch(sequences=8, sequence_length=2048))
