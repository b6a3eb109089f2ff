"""The capstone beside its cases' answers: what seeds change, the sitting, its clock and its page."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from capstone_cases import right
from lab_cases import nudged

from utils.labs.checking import checks_of, find
from utils.labs.verdict import Status
from utils.lessons.lesson_99.cases import CASES, MINUTES, SEEDS, TIERS, four_ranks, sixteen_gb
from utils.lessons.lesson_99.countdown import countdown
from utils.lessons.lesson_99.mistakes import known
from utils.lessons.lesson_99.sitting import Sitting


@pytest.mark.parametrize("name", CASES)
def test_seeds_differ_in_data_and_in_what_is_right(name: str) -> None:
    briefs = {str(CASES[name].data(seed)) for seed in SEEDS}
    assert len(briefs) == 3, "the same brief under two seeds"
    answers = [right(name, seed) for seed in SEEDS]
    assert all(a != b for a, b in itertools.combinations(answers, 2)), "one answer solves two seeds"


def test_every_case_has_two_wrong_ideas_with_words_of_their_own() -> None:
    for name in CASES:
        told = {mistake.says for mistake in known.all if mistake.of == name}
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
