"""Checks of lesson and lab 15, "The design studio"; the planner grades."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from utils.catalog import ModelShape, device, model_shape, price
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import (
    Batch,
    Cluster,
    Estimate,
    Plan,
    estimate,
    explain,
    plan_name,
    search,
    why_it_does_not_fit,
)
from utils.planner.explain import largest_category
from utils.units import GB, format_bytes, format_seconds

SLACK = 0.05
MODEL = "gpt-3-175b"
BATCH = Batch(sequences=1536, sequence_length=2048)
OOM_PLAN = Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2)
TO_FIX = Plan(tp=4, pp=16, recompute="none")
TOKENS_PER_PARAMETER, FLOP_PER_TOKEN = 20, 6  # Hoffmann et al. 2022: 70B parameters, 1.4T tokens


def the_cluster() -> Cluster:
    """64 A100-80GB: 8 nodes of 8."""
    return Cluster(gpu="A100-80GB", nodes=8)


def gb_per_gpu(answer: Any) -> Verdict:
    """Lesson 15: 18 bytes per parameter of 130B over 64 GPUs."""
    right = 18 * 130 / 64
    if not isinstance(answer, (int, float)):
        return not_yet("one number of GB is wanted", got=repr(answer))
    if abs(answer / right - 1) < 0.02:
        return correct(f"18 x 130 / 64 = {right:.1f} GB")
    nudges = {16 * 130 / 64: "That is 16 bytes per parameter. The gradients are fp32 here.",
              18 * 130: "That is all of it. 64 GPUs share it.",
              2 * 130 / 64: "Those are the weights alone."}  # fmt: skip
    nudge = next((text for value, text in nudges.items() if abs(answer / value - 1) < 0.02),
                 "Bytes per parameter, times parameters, over GPUs.")  # fmt: skip
    return not_yet(expected="GB of states on each GPU", got=answer, nudge=nudge)


def micro_batches(answer: Any) -> Verdict:
    """Lesson 15: (p - 1) / m = 5% with 16 stages."""
    if answer == 300:
        return correct("15 / 300 = 5%")
    nudges = {320: "The bubble has p - 1 stages in it, not p.",
              16: "With as many micro-batches as stages nearly half of the time is idle."}  # fmt: skip
    nudge = nudges.get(answer, "Solve (p - 1) / m = 0.05 for m.")
    return not_yet(expected="a whole number of micro-batches", got=repr(answer), nudge=nudge)


def plan_175b(answer: Any) -> Verdict:
    """Exercise 1: a plan that fits, within 5% of the fastest."""
    if not isinstance(answer, Plan):
        return not_yet("a Plan(...) is wanted", got=repr(answer))
    try:
        found = _on_64(answer)
    except ValueError as sentence:
        return not_yet(str(sentence), nudge="dp * tp * pp * cp must be 64, and all must divide.")
    if not found.fits:
        nudge = "Which choice makes that category smaller: a split, a smaller micro-batch, less kept?"
        return not_yet(why_it_does_not_fit(found), nudge=nudge)
    fastest = search(model_shape(MODEL), the_cluster(), BATCH).best
    assert fastest is not None
    slower = found.step_seconds / fastest.step_seconds - 1
    if slower > SLACK:
        return not_yet(f"it fits, and is {slower:.1%} slower than the fastest plan",
                       expected=f"at most {SLACK:.0%}", got=plan_name(found),
                       nudge=_speed_nudge(answer))  # fmt: skip
    needed = format_bytes(found.peak.needed_bytes)
    score = f"{format_seconds(found.step_seconds)} a step, {slower:.1%} off the fastest, {needed}"
    return correct(plan_name(found), score=score)


def _on_64(plan: Plan) -> Estimate:
    return estimate(model_shape(MODEL), the_cluster(), plan, BATCH)


def _speed_nudge(plan: Plan) -> str:
    if plan.recompute == "full":
        return "Full recomputation costs a third of the time. Is the memory that it saves needed?"
    if plan.tp > 8:
        return "Tensor parallelism leaves the node. Keep it on NVLink."
    if plan.tp > 1 and not plan.sequence_parallel:
        return "sequence_parallel splits what TP leaves whole, at no cost in traffic."
    return "Ask explain(...) which single change makes it faster."


def explain_oom(answer: dict[str, Any]) -> Verdict:
    """Exercise 2: which stage overflows, with which category, and by how much."""
    found = _on_64(OOM_PLAN)
    stage, category, missing = answer.values()
    name, size = largest_category(found.peak)
    if stage != found.peak.stage.index:
        nudge = "Stage i holds min(m, p - i) micro-batches, so which holds most? Stages count from 0."
        return not_yet("the stage", got=repr(stage), nudge=nudge)
    if str(category).strip().lower() != name:
        second = found.peak.bytes_by_category.get(str(category).strip().lower())
        held = f"{format_bytes(second)} there" if second is not None else "no category"
        nudge = "Look at the tallest part of that stage's bar. What grew with the micro-batch?"
        return not_yet("the category", got=f"{category!r}: {held}", nudge=nudge)
    if not isinstance(missing, (int, float)):
        return not_yet("the missing memory is a number of GiB", got=repr(missing))
    right = found.missing_bytes / 2**30
    if abs(missing - right) > 0.5:
        nudge = "What the GPU lacks, in GiB: needed less usable."
        if abs(missing - found.peak.needed_bytes / 2**30) < 0.5:
            nudge = "That is all it needs. How much of it does not fit?"
        return not_yet("the missing memory", got=missing, nudge=nudge)
    return correct(f"stage {stage}: {format_bytes(size)} of {name}, {right:.1f} GiB too much")


def fix_by_one_change(answer: Any) -> Verdict:
    """Exercise 3: one field changed, it fits, and no other single change is much faster."""
    if not isinstance(answer, Plan):
        return not_yet("a Plan is wanted: replace(broken, field=value)", got=repr(answer))
    changed = [f.name for f in fields(Plan) if getattr(answer, f.name) != getattr(TO_FIX, f.name)]
    if len(changed) != 1:
        got = ", ".join(changed) or "nothing changed"
        return not_yet(expected="one field changed", got=got, nudge="Undo all but the one you need.")
    try:
        found = _on_64(answer)
    except ValueError as sentence:
        return not_yet(str(sentence))
    if not found.fits:
        nudge = "What is kept whole on every TP rank, although TP could split it?"
        return not_yet(why_it_does_not_fit(found), nudge=nudge)
    fitting = [row.estimate for row in explain(_on_64(TO_FIX)) if row.estimate and row.estimate.fits]
    least = min(row.step_seconds for row in fitting)
    slower = found.step_seconds / least - 1
    if slower > 0.01:
        return not_yet(f"{changed[0]} makes it fit, {slower:.1%} slower than another single change",
                       nudge="What costs neither arithmetic nor the way to the host?")  # fmt: skip
    return correct(f"{changed[0]}", score=f"{format_seconds(found.step_seconds)} a step")


def token_budget(function: Callable[[float, float, float, float], Any]) -> Verdict:
    """Exercise 4: parameters and tokens that a budget buys, at 20 tokens per parameter."""
    for usd, hourly, peak, mfu in [(1e6, 2.79, 312e12, 0.5), (5e4, 3.99, 989e12, 0.4)]:
        found = function(usd, hourly, peak, mfu)
        flop = usd / hourly * 3600 * peak * mfu
        size = (flop / (FLOP_PER_TOKEN * TOKENS_PER_PARAMETER)) ** 0.5
        right = size, TOKENS_PER_PARAMETER * size
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            return not_yet("two numbers are wanted: parameters, tokens", got=repr(found))
        if any(abs(a / b - 1) > 0.01 for a, b in zip(found, right, strict=True)):
            return not_yet(f"${usd:,.0f} at ${hourly} an hour", expected=_size(*right),
                           got=_size(*found), nudge=_budget_nudge(found, right, mfu))  # fmt: skip
    return correct("C = 6 N D with D = 20 N")


def _size(parameters: float, tokens: float) -> str:
    return f"{parameters / 1e9:,.2f}B parameters, {tokens / 1e9:,.1f}B tokens"


def _budget_nudge(found: Any, right: tuple[float, float], mfu: float) -> str:
    ratio = found[0] / right[0]
    wrong = {mfu**-0.5: "GPUs do not run at peak: where is the MFU?",
             60**-1: "An hour has 3600 seconds.",
             3**0.5: "Forward is 2 FLOP per parameter and token, backward twice that: 6 in all.",
             20**0.5: "C = 6 N D, and D is 20 N: N = sqrt(C / 120)."}  # fmt: skip
    close = (text for value, text in wrong.items() if abs(ratio / value - 1) < 0.01)
    if abs(found[1] / found[0] / TOKENS_PER_PARAMETER - 1) > 0.01:
        return "Tokens are 20 times the parameters."
    return next(close, "FLOP = dollars / price * 3600 * peak * MFU; then N = sqrt(FLOP / 120).")


def two_cards(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: A100 or A10 for 13B under a deadline; the premise first."""
    bill, holds, choice = answer.values()
    for card, mfu in (("A100-80GB", 0.45), ("A10", 0.38)):
        peak, hourly = device(card).bf16_tflops * 1e12, _hourly(card)
        found, right = bill(peak, mfu, hourly, 13e9, 260e9, 30), _bill(peak, mfu, hourly)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            return not_yet("the bill is two numbers: GPUs, dollars", got=repr(found))
        if found[0] != right[0] or abs(found[1] / right[1] - 1) > 0.05:
            nudge = "GPUs: 6 N D FLOP over (peak * MFU * seconds), rounded up. Dollars: GPUs * hours * price."
            return not_yet(f"the bill for {card}", expected=f"{right[0]} GPUs, ${right[1]:,.0f}",
                           got=f"{found[0]} GPUs, ${found[1]:,.0f}", nudge=nudge)  # fmt: skip
    if holds is not False:
        gigabytes = _a10_alone().peak.state_bytes / GB
        return not_yet("the premise", got=repr(holds),
                       nudge=f"Plain DP keeps {gigabytes:.0f} GB of states on every card of 24.")  # fmt: skip
    if str(choice).upper() not in ("A100", "A100-80GB"):
        nudge = "Compare dollars for the same FLOP, and ask what must be sharded over PCIe."
        return not_yet("the choice", got=repr(choice), nudge=nudge)
    return correct("A10: more cards, more dollars, and plain DP does not even start")


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
