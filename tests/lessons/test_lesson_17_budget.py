"""Accounts of runs, scaling laws, offers, decisions and their figures, held against published figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evidence.validation import table
from utils.catalog import device, model_shape
from utils.lessons.lesson_17.account import Account
from utils.lessons.lesson_17.decision import Option, decide, winners
from utils.lessons.lesson_17.offers import Offer, cheapest, purchase
from utils.lessons.lesson_17.scaling import CHINCHILLA, REPLICATION, UNROUNDED, ScalingLaw
from utils.lessons.lesson_17.scaling_fit import fit_law, leave_one_out
from utils.planner import Batch, Plan
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.flops import hardware_flops, model_flops
from utils.planner.goodput import DAY, best_interval_seconds, working_share

RUN: dict[str, Any] = {"gpu": "A100-80GB", "seconds": 3600.0, "tokens": 1e6, "model_flops": 1e15}


def test_the_utilizations_differ_by_what_is_recomputed() -> None:
    """Llama 3 405B on 8,192 GPUs: 430 TFLOP/s, MFU 43% (arXiv:2407.21783, Table 4)."""
    row = table("llama3_table4")[0]
    gpus, per_gpu = 8192, 3600 * 1e12 * float(row["tflops_per_gpu"])
    run = Account(**(RUN | {"gpu": "H100", "gpus": gpus, "model_flops": gpus * per_gpu}))
    assert 100 * run.mfu == pytest.approx(float(row["bf16_mfu_pct"]), abs=0.6)
    assert run.hfu == run.mfu, "nothing recomputed is said"
    model, batch = model_shape("megatron-175b"), Batch(sequences=64, sequence_length=2048)
    need, did = (
        model_flops(model, batch),
        hardware_flops(model, Plan(recompute="full", attention="unfused"), batch),
    )
    both = Account(**(RUN | {"model_flops": need, "hardware_flops": did}))
    assert both.hfu / both.mfu == pytest.approx(4 / 3, abs=0.01)


def test_dollars_by_tokens() -> None:
    run = Account(**(RUN | {"gpus": 8, "usd_per_gpu_hour": 2.0, "tokens": 4e6}))
    assert (run.gpu_hours, run.usd, run.usd_per_million_tokens) == (8.0, 16.0, 4.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seconds": 0}, "seconds is 0; it must be above 0"),
        ({"tokens": -1}, "tokens is -1"),
        ({"usd_per_gpu_hour": 0}, "usd_per_gpu_hour is 0"),
        ({"hardware_flops": 1.0}, "Are the two swapped"),
        ({"gpus": 0.5}, "whole number"),
        ({"gpu": "abacus"}, "No device is called"),
    ],
)
def test_an_account_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _ = Account(**(RUN | change)).device


def test_an_account_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="no price"):
        _ = Account(**RUN).usd


def test_the_replication_gives_chinchilla_s_ratio() -> None:
    """5.76e23 FLOP: 70B on 1.4T tokens were trained (Hoffmann et al. 2022, section 4)."""
    flop = 5.76e23
    assert REPLICATION.best_parameters(flop) == pytest.approx(70e9, rel=0.05)
    assert REPLICATION.best_tokens(flop) / REPLICATION.best_parameters(flop) == pytest.approx(
        20, abs=2
    )
    ratio = {
        law.source: law.best_tokens(flop) / law.best_parameters(flop)
        for law in (CHINCHILLA, UNROUNDED)
    }
    assert min(ratio.values()) > 50, f"the paper's own constants disagree with its 20: {ratio}"


@pytest.mark.parametrize("law", [CHINCHILLA, UNROUNDED, REPLICATION])
def test_the_best_size_is_the_lowest_of_its_valley(law: ScalingLaw) -> None:
    for flop in (1e18, 1e24):
        best = law.best_parameters(flop)
        least = law.loss(best, flop / 6 / best)
        sizes = np.geomspace(best / 30, best * 30, 301)
        assert least <= min(law.loss(n, flop / 6 / n) for n in sizes) + 1e-12
        assert law.tokens_for(least, best) == pytest.approx(flop / 6 / best, rel=1e-6)
        assert law.cheapest_parameters(least) == pytest.approx(best, rel=1e-3)


def test_service_makes_smaller_models_as_sardana_found() -> None:
    """A 13B model and 2T tokens served: 7B saves 1.7e22 FLOP, 17% (arXiv:2401.00448, figure 1)."""
    law = ScalingLaw(1.69, 406.4, 410.7, 0.336, 0.283, "as Sardana et al. use it")
    flop = next(c for c in np.geomspace(1e21, 1e24, 30_000) if law.best_parameters(c) >= 13e9)
    loss = law.loss(13e9, flop / 6 / 13e9)
    large, small = (law.lifetime_flop(loss, size, 2e12) for size in (13e9, 7e9))
    assert large - small == pytest.approx(1.7e22, rel=0.03)
    assert 1 - small / large == pytest.approx(0.17, abs=0.01)
    assert law.cheapest_parameters(loss, 2e12) == pytest.approx(7e9, rel=0.03)
    demand = [law.cheapest_parameters(loss, served) for served in (0, 1e11, 1e12, 1e13)]
    assert demand == sorted(demand, reverse=True), "more service, smaller model"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: REPLICATION.tokens_for(1.8, 1e9), "the law's floor is 1.8172"),
        (lambda: REPLICATION.tokens_for(2.0, 1e6), "never reach a loss of 2.0"),
        (lambda: REPLICATION.best_parameters(0), "train_flop is 0"),
        (lambda: replace(REPLICATION, alpha=0), "alpha is 0"),
        (lambda: REPLICATION.lifetime_flop(2.2, 1e10, -1), "served_tokens is -1"),
        (lambda: fit_law([(1, 1, 1)] * 9), "1 sizes of model"),
        (lambda: fit_law([(n, 1e9, 3.0) for n in (1e6, 1e7, 1e8)]), "1 amounts of tokens"),
        (lambda: fit_law([(1e6, 1e9, math.nan)]), "finite and above zero"),
        (
            lambda: fit_law(
                [(n, d, 1 + n / 1e6 * d / 1e6) for n in (1e6, 1e7, 1e8) for d in (1e6, 1e7, 1e8)]
            ),
            "learning rate",
        ),
    ],
)
def test_impossible_laws_and_losses_are_refused(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_fit_finds_the_law_that_made_the_runs() -> None:
    runs = [
        (n, d, REPLICATION.loss(n, d)) for n in (1e7, 1e8, 1e9, 1e10) for d in (1e9, 1e10, 1e11)
    ]
    found = fit_law(runs)
    assert found.e == pytest.approx(REPLICATION.e, rel=0.003)
    assert (found.alpha, found.beta) == pytest.approx(
        (REPLICATION.alpha, REPLICATION.beta), rel=0.01
    )
    assert max(abs(found.loss(n, d) / loss - 1) for n, d, loss in runs) < 1e-4
    left = leave_one_out(runs)
    assert len(left) == 4 and all(abs(law.alpha - found.alpha) < 0.02 for law in left), left
    flat = [(n, d, 3 * n**-0.1 + 40 * d**-0.3) for n, d, _ in runs]
    assert fit_law(flat).e == pytest.approx(0, abs=0.05), "a law without a floor"


A100 = Offer(
    name="A100",
    usd_per_gpu_hour=2.79,
    as_of="2026-11-21",
    flops_per_second=1.4e14,
    memory_bytes=80e9,
    most_nodes=8,
)


def test_a_purchase_adds_up() -> None:
    loss = REPLICATION.loss(7e9, 140e9)
    one = purchase(REPLICATION, loss, A100, 4, 7e9, 1e12)
    assert one.tokens == pytest.approx(140e9, rel=1e-6)
    seconds = 6 * 7e9 * 140e9 / (32 * 1.4e14 * 0.98**2)
    assert one.days == pytest.approx(seconds / DAY, rel=1e-6)
    served = 2 * 7e9 * 1e12 / 1.4e14 / 3600 * 2.79
    assert one.usd == pytest.approx(seconds / 3600 * 32 * 2.79 + served, rel=1e-6)
    assert A100.holds(1, 32e9) and not A100.holds(1, 32.1e9), "80% of 640 GB at 16 bytes"


def test_the_cheapest_is_small_unless_the_deadline_says_otherwise() -> None:
    loss = REPLICATION.loss(7e9, 140e9)
    slow, fast = (cheapest(REPLICATION, loss, days, [A100]) for days in (365, 10))
    assert (
        slow and fast and slow.nodes == 1 < fast.nodes and fast.days <= 10 and slow.usd < fast.usd
    )
    assert cheapest(REPLICATION, loss, 0.1, [A100]) is None
    assert cheapest(REPLICATION, 1.8, 365, [A100]) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"as_of": ""}, "A price without a date"),
        ({"as_of": "yesterday"}, "such as 2026-11-21"),
        ({"usd_per_gpu_hour": 0}, "usd_per_gpu_hour is 0"),
        ({"lost_per_doubling": 1}, "a share from 0"),
    ],
)
def test_an_offer_without_a_date_or_price_is_none(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(A100, **change)


CHEAP, QUICK = Option("cheap", {"usd": 100, "days": 40}), Option("quick", {"usd": 200, "days": 20})
NEVER = Option("never", {}, obstacle="208 GB on a card of 24")


def test_what_cannot_run_or_is_late_is_out_before_anything_is_weighed() -> None:
    ranked = decide([NEVER, CHEAP, QUICK], {"usd": 1}, {"days": 30})
    assert next(row.option.name for row in ranked) == "quick" and ranked[0].score == 1
    struck = {row.option.name: row.struck for row in ranked}
    assert struck["cheap"] == "days 40, the limit is 30" and "208 GB" in struck["never"]
    assert decide([CHEAP], {"usd": 1}, {"days": 40})[0].score == 1, "at the limit is in time"


def test_marks_are_shares_of_the_best_and_a_loser_changes_nothing() -> None:
    ranked = decide([CHEAP, QUICK], {"usd": 3, "days": 1})
    assert [round(row.score or 0, 4) for row in ranked] == [0.875, 0.625]
    loser = Option("loser", {"usd": 999, "days": 999})
    more = decide([loser, CHEAP, QUICK], {"usd": 3, "days": 1})
    assert [(row.option.name, row.score) for row in more[:2]] == [
        (row.option.name, row.score) for row in ranked
    ]


def test_the_winner_turns_with_weights_and_prices() -> None:
    def options(price: float) -> list[Option]:
        return [Option("cheap", {"usd": 100 * price, "days": 40}), QUICK]

    grid = winners(options, (1, 3), lambda usd: {"usd": usd, "days": 1 - usd}, (0.2, 0.8))
    assert grid == [["quick", "cheap"], ["quick", "quick"]]
    assert winners(lambda price: [NEVER], (1,), lambda usd: {"usd": 1}, (0.5,)) == [[""]]


@pytest.mark.parametrize(
    ("options", "weights", "sentence"),
    [
        ([], {"usd": 1}, "no options"),
        ([CHEAP], {}, "no weights"),
        ([CHEAP], {"usd": 0}, "all weights are 0"),
        ([CHEAP], {"usd": -1}, "usd is -1"),
        ([CHEAP], {"beauty": 1}, "cheap has no value for 'beauty'"),
        ([CHEAP, CHEAP], {"usd": 1}, "two options are called 'cheap'"),
        ([Option("free", {"usd": 0})], {"usd": 1}, "usd of free is 0; it must be above 0"),
    ],
)
def test_a_matrix_that_cannot_be_weighed_is_refused(
    options: Any, weights: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        decide(options, weights)


def test_spot_nodes_in_simulation_as_by_formula() -> None:
    """The useful share of 8 nodes, each taken back once a day, with quick and slow checkpoints."""
    for save in (10.0, 600.0):
        mean = DAY / 8
        every = best_interval_seconds(save, mean)
        plan = RunPlan(2 * DAY, every, save, 300.0, 8, 1000.0)
        share = failing_runs(plan, 400).goodput.mean()
        assert share == pytest.approx(working_share(every, save, 300.0, mean), rel=0.02)


def test_plain_data_parallelism_of_13b_does_not_start_on_an_a10() -> None:
    model = model_shape("llama-2-13b")
    assert 2 * model.parameter_count > device("A10").memory_bytes, "the bf16 weights alone overflow"
    assert 16 * model.parameter_count == pytest.approx(208e9, rel=0.01)
