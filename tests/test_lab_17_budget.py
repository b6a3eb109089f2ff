"""The checks of lab 17's budget: right answers, and plausible wrong ones with their own messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from lab_cases import nudged, solved_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_17.budget import (
    _markets,
    cheapest_run,
    lab_offers,
    matrix_reviewed,
    right_bill,
    training_share,
)
from utils.lessons.lesson_17.matrix import KINDS, LINES
from utils.planner.offers import Offer, cheapest
from utils.planner.scaling import REPLICATION, ScalingLaw

LAB = solved_lab("advanced/17_cluster_and_budget")
Search = Callable[..., Any]


def solution(name: str) -> Any:
    """A name that the cells of the solved lab define."""
    names: dict[str, Any] = {"check": lambda *given: None, "__name__": "__main__"}
    source = LAB.read_text(encoding="utf-8")
    cell = next(c for c in source.split("\n# %%") if f"{name}" in c and "BEGIN SOLUTION" in c)
    exec("import math\n" + cell.partition("\n")[2], names)
    return names


def brute(market_change: Callable[..., dict[str, Any]] | None = None, **kept: Any) -> Search:
    """A search like the solution's, with one thing done wrongly."""

    def search(
        law: ScalingLaw, loss: float, days: float, offers: list[Offer], served: float
    ) -> Any:
        asked = {"law": law, "loss": loss, "days": days, "offers": offers, "served_tokens": served}
        asked |= kept | (market_change(asked) if market_change else {})
        found = cheapest(**asked)
        if found is None:
            return None
        return {"offer": found.offer.name, "nodes": found.nodes, "parameters": found.parameters}

    return search


def test_the_lab_s_solution_is_correct() -> None:
    verdict = cheapest_run(solution("def cheapest_run")["cheapest_run"])
    assert verdict.status is Status.CORRECT, verdict
    assert "par $" in verdict.score


def test_the_markets_bind_by_deadline_memory_service_and_not_at_all() -> None:
    found = {market.says: market.best() for market in _markets()}
    assert [row is None for row in found.values()].count(True) == 2
    names = [row.offer.name for row in found.values() if row]
    assert {"A100", "H100", "A10"} == set(names), names
    in_time = found["the same loss in 5 days, three kinds"]
    assert in_time and in_time.offer.name == "A100" and in_time.nodes > 8, in_time


def none_is_none(change: Callable[[dict[str, Any], Any], Any]) -> Search:
    """The right answer, changed where there is one."""

    def search(*asked: Any) -> Any:
        found = brute()(*asked)
        return found and change(found, asked)

    return search


def without_the_last_node(asked: dict[str, Any]) -> dict[str, Any]:
    return {"offers": [replace(o, most_nodes=max(1, o.most_nodes - 1)) for o in asked["offers"]]}


WRONG: list[tuple[Search, str]] = [
    (brute(without_the_last_node), "range end at most_nodes, or one before"),
    (brute(days=math.inf), "strike out what is late"),
    (brute(served_tokens=0.0), "best for training alone"),
    (brute(lambda asked: {"offers": sorted(asked["offers"], key=lambda o: o.usd_per_gpu_hour)[:1]}
           if asked["days"] > 30 else {}), "cheapest hour is not the cheapest FLOP"),
    (none_is_none(lambda found, _: found | {"nodes": 1}), "strike out what is late"),
    (none_is_none(lambda found, asked: found | {"parameters": 2 * found["parameters"]}),
     "Which size costs least"),
    (none_is_none(lambda found, asked: found | {"parameters": 1e6}), "least_parameters"),
    (none_is_none(lambda found, asked: found | {"nodes": 99}), "1 to most_nodes"),
    (none_is_none(lambda found, asked: found | {"nodes": asked[3][0].most_nodes}), "lose speed"),
    (none_is_none(lambda found, asked: found | {"nodes": 1} if asked[2] == 1460 else found),
     "16 bytes a parameter"),
    (lambda *asked: None, "Try other sizes"),
    (none_is_none(lambda found, asked: tuple(found.values())), "a dict with the keys"),
]  # fmt: skip


@pytest.mark.parametrize(("search", "words"), WRONG)
def test_a_wrong_search_gets_its_own_message(search: Search, words: str) -> None:
    nudged(cheapest_run(search), words)


def test_twenty_tokens_a_parameter_are_not_every_law_s_ratio() -> None:
    def twenty(found: dict[str, Any], asked: Any) -> dict[str, Any]:
        law, low, high = asked[0], asked[0].least_parameters(asked[1]) * 1.001, 1e13
        for _ in range(100):
            middle = math.sqrt(low * high)
            few = law.tokens_for(asked[1], middle) < 20 * middle
            low, high = (low, middle) if few else (middle, high)
        return found | {"parameters": low}

    nudged(cheapest_run(none_is_none(twenty)), "rule of thumb")


def test_nan_is_no_size() -> None:
    verdict = cheapest_run(none_is_none(lambda found, _: found | {"parameters": math.nan}))
    assert verdict.status is Status.NOT_YET, verdict


def test_a_way_where_there_is_none_is_refused() -> None:
    best = brute()

    def always(law: ScalingLaw, loss: float, days: float, *rest: Any) -> Any:
        return (
            best(law, max(loss, law.e + 0.3), max(days, 400), *rest)
            if days == 1
            else best(law, loss, days, *rest)
        )

    nudged(cheapest_run(always), "strike out what is late")


def test_what_a_learner_finds_is_not_attempted() -> None:
    def cheapest_run(law, loss, days, offers, served_tokens): ...

    untouched = {"lines": ..., "days": ..., "usd": ..., "winner": ...}
    for name, answer in (("cheapest_run", cheapest_run), ("matrix_reviewed", untouched)):
        assert check(f"17.{name}", answer).status is Status.NOT_ATTEMPTED, name
    text = LAB.read_text(encoding="utf-8")
    assert all(f"# STUB: {name} = ..." in text for name in untouched), "the lab's stubs"


def answer(**changes: Any) -> dict[str, Any]:
    both = ("A100", "H100")
    right = {"lines": {str(n): line.kind for n, line in enumerate(LINES, 1)},
             "days": {card: right_bill(card)[0] for card in both},
             "usd": {card: right_bill(card)[1] for card in both}, "winner": "H100"}  # fmt: skip
    for name, value in changes.items():
        right[name] = right[name] | value if isinstance(value, dict) else value
    return right


def test_the_reviewed_matrix_of_the_solution_is_correct() -> None:
    solved = solution("wrong = {1:")
    given = {name: solved[name] for name in ("lines", "days", "usd", "winner")}
    verdict = matrix_reviewed(given)
    assert verdict.status is Status.CORRECT, verdict


DAYS, USD = right_bill("A100"), right_bill("H100")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lines": {"1": "right"}}, "Which passes"),
        ({"lines": {"2": "right"}}, "print twice as much"),
        ({"lines": {"5": "right"}}, "When was that"),
        ({"lines": {"6": "right"}}, "what the profiler counted"),
        ({"lines": {"8": "right"}}, "when Adam takes a step"),
        ({"lines": {"9": "right"}}, "bytes has a GiB"),
        ({"lines": {"9": "memory"}}, "and not that"),
        ({"lines": {"11": "units"}}, "it holds"),
        ({"days": {"A100": DAYS[0] / 3}}, "forward pass alone"),
        ({"days": {"A100": DAYS[0] * 0.95}}, "95% of the time"),
        ({"days": {"A100": DAYS[0] * 0.75}}, "3/4 of that MFU"),
        ({"days": {"A100": DAYS[0] / 2}}, "with sparsity"),
        ({"usd": {"H100": USD[1] / 2.95 * 12}}, "slide's price"),
        ({"usd": {"A100": DAYS[1] / 24}}, "24 hours"),
        ({"winner": "A100"}, "who is out"),
        ({"lines": {"1": "typo"}}, "a kind of mistake"),
        ({"days": {"A100": math.nan}}, "no finite number"),
    ],
)
def test_a_wrong_review_gets_its_own_message(changes: dict[str, Any], words: str) -> None:
    nudged(matrix_reviewed(answer(**changes)), words)


def test_the_matrix_has_right_lines_and_every_kind_of_mistake() -> None:
    assert {line.kind for line in LINES} == set(KINDS), "each kind stands once or more"
    assert [line.kind for line in LINES].count("right") == 6, "the lab's hint says six"
    assert all(line.hint for line in LINES if line.kind != "right"), "a mistake needs its hint"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.5, "three times"), (0.25, "share of serving"), (75, "from 0 to 1"), (0.6, "6 N D")],
)
def test_the_lesson_s_question(share: float, words: str) -> None:
    assert training_share(0.75).status is Status.CORRECT
    nudged(training_share(share), words)


def test_offers_are_dated_and_their_law_is_named() -> None:
    assert all(offer.as_of for offer in lab_offers()), "a price needs its day"
    assert "2404.10102" in REPLICATION.source
