"""The capstone: every case solved by its model answer for every seed, failed by plausible wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from capstone_cases import right
from lab_cases import nudged

from utils import Lora, Plan
from utils.labs.checking import checks_of, find
from utils.labs.verdict import Status, Verdict
from utils.lessons.lesson_99.cases import CASES, MINUTES, SEEDS, TIERS, four_ranks, sixteen_gb
from utils.lessons.lesson_99.countdown import countdown
from utils.lessons.lesson_99.sitting import Sitting

BOTH = list(itertools.product(CASES, SEEDS))


def verdict(name: str, seed: int, **changed: Any) -> Verdict:
    return find(f"99.{name}")({"seed": seed, **right(name, seed), **changed})


@pytest.mark.parametrize(("name", "seed"), BOTH)
def test_the_model_answer_solves_every_seed(name: str, seed: int) -> None:
    assert verdict(name, seed).status is Status.CORRECT, verdict(name, seed)


@pytest.mark.parametrize("name", CASES)
def test_seeds_differ_in_data_and_in_what_is_right(name: str) -> None:
    briefs = {str(CASES[name].data(seed)) for seed in SEEDS}
    assert len(briefs) == 3, "the same brief under two seeds"
    answers = [right(name, seed) for seed in SEEDS]
    assert all(a != b for a, b in itertools.combinations(answers, 2)), "one answer solves two seeds"


def changed_step(name: str, seed: int) -> dict[str, Any]:
    """Plausible wrong parts that need the data of a seed."""
    answer = right(name, seed)
    if name == "components":
        log = CASES[name].data(seed)
        one, two = log.peak_gib[1], log.peak_gib[2]
        return {"fixed GiB": 2 * one - two}
    if name == "order_of_cures":
        return {"steps": [*answer["steps"], {"recompute": "full"}]
                if seed == 2 else [{"offload": "optimizer"}, {"recompute": "full"}, {"micro_batch": 1}, {"loss": "chunked"}]}  # fmt: skip
    raise AssertionError(name)


FULL_ADAPTERS = Plan(lora=Lora(rank=16, base="nf4-dq"), recompute="full", micro_batch=1)
WRONG: list[tuple[str, Callable[[int], dict[str, Any]], str]] = [
    ("components", lambda seed: changed_step("components", seed), "Which rows lie on one"),
    ("components", lambda seed: {"activations": "8-bit optimizer"}, "computes them again"),
    ("sixteen_gb", lambda seed: {"amp batch": 2 * right("sixteen_gb", seed)["fp32 batch"]}, "The states do not"),
    ("sixteen_gb", lambda seed: {"what shrinks": "optimizer state"}, "stay in fp32 under autocast"),
    ("nan_run", lambda seed: {"cause": "scale grows without end"}, "A scaler halves after each overflow"),
    ("nan_run", lambda seed: {"cure": "smaller first scale"}, "on what follows from it"),
    ("four_ranks", lambda seed: {"efficiency": 4 * right("four_ranks", seed)["efficiency"]}, "That is the speedup"),
    ("four_ranks", lambda seed: {"cause": "too little work"}, "" ),
    ("seven_billion", lambda seed: {"full": Plan(framework="deepspeed", zero_stage=2)}, "Over one rank a part is the whole"),
    ("seven_billion", lambda seed: {"adapters": replace(FULL_ADAPTERS, offload="optimizer")}, "How many bytes of state do the adapters have"),
    ("zero_or_fsdp", lambda seed: dict(zip("AB", reversed([right("zero_or_fsdp", seed)[n] for n in "AB"]), strict=True)), "Which of the two is made for that"),
    ("zero_or_fsdp", lambda seed: {"A": replace(right("zero_or_fsdp", seed)["A"], zero_stage=3, micro_batch=1)}, "Stage 3 gathers every parameter"),
    ("order_of_cures", lambda seed: changed_step("order_of_cures", seed), ""),
    ("order_of_cures", lambda seed: {"steps": [{"offload": "optimizer"}]}, "A cure for another one moves nothing"),
    ("unknown_job", lambda seed: {"cause": "optimizer step"}, "are they what fills it"),
    ("unknown_job", lambda seed: {"beyond alive MiB": CASES["unknown_job"].data(seed).allocator_mib}, "How much of it is not alive"),
    ("eight_nodes", lambda seed: {"order": list(reversed(right("eight_nodes", seed)["order"]))}, "What another fault hides saves nothing yet"),
    ("eight_nodes", lambda seed: {"times one node": right("eight_nodes", seed)["times one node"] / 8}, "eight nodes do eight times the work"),
    ("one_billion", lambda seed: {"plan": Plan(dp=8, tp=8, sequence_parallel=True, framework="fsdp")}, "what does TP buy here"),
    ("one_billion", lambda seed: {"states GB": right("one_billion", seed)["states GB"] / 8}, "weights in bf16 alone"),
    ("lay_out", lambda seed: {"plan": Plan(tp=8, pp=8, dp=8, zero_stage=1)}, "there are 64"),
    ("lay_out", lambda seed: {"days": (200.0, 200.0)}, "One number says nothing"),
    ("half_the_cards", lambda seed: {"plan": Plan(tp=8, pp=4, sequence_parallel=True)}, "Where else is memory"),
    ("half_the_cards", lambda seed: {"plan": Plan(dp=32, zero_stage=3, recompute="full", offload="optimizer")}, "more bytes than stages send"),
    ("survive", lambda seed: {"failures": len(CASES["survive"].data(seed).lines)}, "is an echo, not a failure"),
    ("survive", lambda seed: {"order": ["load the newest checkpoint that verifies", "stop every rank", "take the node out", "put the spare in", "compare the loss with the log"]}, "What comes first"),
    ("survive", lambda seed: {"per 1,000 node-days": (10.0, 10.0)}, "How far off may their rate be"),
    ("two_offers", lambda seed: {"A10 plain": {"nodes": 8, "usd": 100_000}}, "splits none of them"),
    ("two_offers", lambda seed: {"choice": "A10 plain"}, "no price of a run"),
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "wrong", "words"), WRONG, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_wrong_idea_gets_its_own_words(name: str, wrong: Callable[[int], dict[str, Any]], words: str, seed: int) -> None:  # fmt: skip
    found = verdict(name, seed, **wrong(seed))
    nudged(found, words)
    assert found.nudge, "a wrong idea is told something"


def test_every_case_has_two_wrong_ideas_with_words_of_their_own() -> None:
    for name in CASES:
        told = {verdict(name, 1, **wrong(1)).nudge for other, wrong, _ in WRONG if other == name}
        assert len(told) >= 2, name


def test_the_untouched_lab_is_not_attempted(capsys: pytest.CaptureFixture[str]) -> None:
    sitting = Sitting()
    sitting.open("nan_run", widget=False)
    report = sitting.hand_in(
        "nan_run", {"cause": ..., "step": ..., "fp32 breaks too": ..., "cure": ...}
    )
    assert report.status is Status.NOT_ATTEMPTED and sitting.entries["nan_run"].tries == 0
    assert "20 minutes left" in capsys.readouterr().out
    assert report.verdict.nudge == ""


def test_every_check_has_its_case_and_every_tier_some() -> None:
    assert set(checks_of("99")) == set(CASES)
    assert {sheet.tier for sheet in CASES.values()} == set(TIERS) and MINUTES == 20
    assert len({sheet.question for sheet in CASES.values()}) == len(CASES) == 14


def test_a_seed_that_is_none_is_refused() -> None:
    nudged(find("99.survive")({**right("survive", 1), "seed": 4}), "A seed is one of 1, 2, 3")
    with pytest.raises(ValueError, match="seed 1, 2, 3"):
        Sitting(seed=0)


def test_the_log_of_small_batches_tells_the_large_one() -> None:
    """What a line through two rows says, the simulator says too."""
    case, most = CASES["sixteen_gb"].data(1), right("sixteen_gb", 1)["fp32 batch"]
    at_most, over = (sixteen_gb.peak_mib(1, images, None) for images in (most, most + 16))
    assert at_most <= 1.01 * case.budget_mib < 1.01 * over


def test_a_sitting_keeps_time_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    sitting = Sitting(learner="<Ada> & co", seed=2, clock=lambda: now[0])
    with pytest.raises(ValueError, match="was not opened"):
        sitting.hand_in("survive", {})
    for name, minutes in (("lay_out", 10), ("survive", 25)):
        sitting.open(name, widget=False)
        now[0] += 60 * minutes
        assert sitting.hand_in(name, right(name, 2)).is_correct
    assert "no name yet" not in str(sitting) and "no name yet" in str(Sitting()), (
        "a page is somebody's"
    )
    sitting.open("four_ranks", widget=False)
    assert not sitting.hand_in("four_ranks", {**right("four_ranks", 2), "rank": 3}).is_correct
    assert "2 of 14 cases solved" in str(sitting) and "survive         solved in minute 25" in str(
        sitting
    )
    page = sitting.page(tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert "&lt;Ada&gt; &amp; co" in page and "<Ada>" not in page
    assert (
        "solved, after the end" in page and "$48" in page and "TiB" in page and "predicted" in page
    )
    assert (
        "<script" not in page
        and "http" not in page
        and 'lang="en"' in page
        and "@media print" in page
    )
    assert (
        page.count("<table>") >= 3 == page.count("<h2>") - 2 + (page.count("From the lessons") == 0)
    )
    assert page.count('scope="col"') and page.count('scope="row"') and page.count("<caption>") >= 3


def test_the_trace_adds_up() -> None:
    for seed in SEEDS:
        case = CASES["four_ranks"].data(seed)
        assert {event["pid"] for event in case.events} == set(range(four_ranks.RANKS))
        ends = {event["pid"]: event["ts"] + event["dur"] for event in case.events}
        assert max(ends.values()) - min(ends.values()) < 1, "all ranks end together"


def test_the_clock_is_the_readers_to_start() -> None:
    play, bar, gone, label = countdown(20, "survive").children
    assert (play.max, bar.max, gone.max, label.value) == (1200, 1200, 1200, "of 1200")
    assert play.interval == 1000 and play.value == 0 and bar.description == "survive"
    with pytest.raises(ValueError, match="more than 0 minutes"):
        countdown(0)


def test_a_model_answer_can_be_handed_in_for_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    sitting = Sitting(seed=3)
    assert sitting.solve("survive", lambda log: right("survive", 3)).is_correct
    assert "survive" in sitting.entries and "20 minutes" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="There is no case 'surive'"):
        sitting.solve("surive", dict)
