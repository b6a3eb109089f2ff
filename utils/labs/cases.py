"""Checks as data: the vocabulary in which labs say what is right, what is nearly right, and why.

A question of a lesson is one value::

    doubled_batch = Question(
        "Lesson 01: 2 GiB of states and 4 GiB that grow with the batch, doubled.",
        number("a number of GiB"), right=10, within=0.5,
        wrong={12: "That doubles everything. The states do not know the batch."},
        nudge="Which part of the 6 GiB grows with the batch, and which stays?",
        note="2 GiB of states stay, 4 GiB become 8",
    )

An exercise whose function is judged by calls alone is a list of cases::

    state_bytes = Exercise(
        "Exercise 1: bytes of parameters, gradients and optimizer state.",
        cases=[Case((1000, "adam"), right=16_000, says="for 1000 parameters and 'adam'",
                    wrong={4000: "That counts numbers. Each takes four bytes."})],
        nudge="Which numbers does this optimizer keep?", note="8, 12 and 16 bytes",
    )

An equality case, where the two sides of a limit meet, is a `Case` whose `nudge` says so: it stands
after the general ones, so that whoever fails it alone reads about the limit.

Any other check is a function that declares what it takes, and gets the answer in its one form::

    @takes(keys({"rank": whole(), "cure": function()}))
    def deadlock(answer: dict[str, Any]) -> Verdict: ...

In it, `kind.returned(f(x))` reads what a learner's function gave, and `judge(found, right, ...)` and
`first_wrong(f, cases)` give a "not yet" or None: `return first_wrong(f, cases) or correct(...)`. They
end the check by raising `NotYet` where a result is of another kind. `scored` writes a score beside
its par. Compare numbers with `equal` only: NaN passes no other comparison than `<=` by accident.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.labs.kinds import Kind, NotYet, as_number, equal, function, number
from utils.labs.verdict import Verdict, correct, not_yet, shown

NOT_FINITE = "That is no finite number. Which operation made it?"


@dataclass(frozen=True)
class Case:
    """One call of a learner's function.

    Args:
        given: The arguments.
        right: What it is to return.
        says: What the verdict says of the case: "for 4 ranks".
        wrong: Results of known mistakes, each with its nudge; the first that equals is taken.
        nudge: For any other result; that of the exercise if left out.
    """

    given: tuple[Any, ...]
    right: Any
    says: str
    wrong: Mapping[Any, str] = field(default_factory=dict)
    nudge: str = ""


def judge(
    found: Any,
    right: Any,
    says: str = "",
    *,
    wrong: Mapping[Any, str] | None = None,
    nudge: str = "",
    expected: object = None,
    within: float = 0.0,
    relative: float = 0.0,
) -> Verdict | None:
    """None if a value is the right one, else a "not yet" with the nudge of the mistake it shows.

    `wrong` is compared with the same tolerance as the right value. `expected` stands in the
    verdict in place of the right value, where that would give the answer away.
    """
    tolerance = {"within": within, "relative": relative}
    if equal(found, right, **tolerance):
        return None
    known = (text for value, text in (wrong or {}).items() if equal(found, value, **tolerance))
    value = as_number(found)
    is_wild = isinstance(value, float) and not math.isfinite(value)
    nudge = next(known, NOT_FINITE if is_wild else nudge)
    wanted = right if expected is None else expected
    return not_yet(says, expected=wanted, got=shown(found), nudge=nudge)


def first_wrong(
    answer: Callable[..., Any],
    cases: Sequence[Case],
    *,
    returns: Kind | None = None,
    nudge: str = "",
    within: float = 0.0,
    relative: float = 0.0,
) -> Verdict | None:
    """The verdict on the first case that a learner's function fails; None if it passes all.

    Raises:
        NotYet: a result is not of the kind `returns`, a number if left out.
    """
    kind = returns or number()
    for case in cases:
        found = kind.returned(answer(*case.given))
        verdict = judge(
            found,
            case.right,
            case.says,
            wrong=case.wrong,
            nudge=case.nudge or nudge,
            within=within,
            relative=relative,
        )
        if verdict:
            return verdict
    return None


@dataclass(frozen=True)
class Question:
    """A question with one right value; a check.

    Args:
        about: Where it stands and what it asks; the check's description.
        kind: What the answer is.
        right: The right value, as the kind reads it.
        wrong: Known wrong values, each with its nudge.
        nudge: For any other value.
        note: What a right answer is told.
        expected: What is wanted, in words; the right value is never shown.
        within: How far from `right` a number may lie.
        relative: The same, as a share of `right`.
    """

    about: str
    kind: Kind
    right: Any
    wrong: Mapping[Any, str] = field(default_factory=dict)
    nudge: str = ""
    note: str = ""
    expected: str = ""
    within: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)

    def __call__(self, answer: Any) -> Verdict:
        try:
            found = self.kind.of(answer)
        except NotYet as ending:
            return ending.verdict
        verdict = judge(
            found,
            self.right,
            wrong=self.wrong,
            nudge=self.nudge,
            expected=self.expected or self.kind.what.rstrip(","),
            within=self.within,
            relative=self.relative,
        )
        return verdict or correct(self.note)


@dataclass(frozen=True)
class Exercise:
    """A function to write that is judged by what it returns; a check.

    Args:
        about: Which exercise it is and what it asks; the check's description.
        cases: The calls, in the order in which a learner best reads of them.
        returns: What the function returns.
        nudge: For results that no case knows.
        note: What a right answer is told.
        within: How far from the right value a number may lie.
        relative: The same, as a share of the right value.
    """

    about: str
    cases: Sequence[Case]
    returns: Kind = field(default_factory=number)
    nudge: str = ""
    note: str = ""
    within: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)

    def __call__(self, answer: Any) -> Verdict:
        try:
            verdict = first_wrong(
                function().of(answer),
                self.cases,
                returns=self.returns,
                nudge=self.nudge,
                within=self.within,
                relative=self.relative,
            )
        except NotYet as ending:
            return ending.verdict
        return verdict or correct(self.note)


def takes(kind: Kind) -> Callable[[Callable[[Any], Verdict]], Callable[[Any], Verdict]]:
    """Declare what a check takes: it gets the answer in its one form, or is not called at all."""

    def declare(check: Callable[[Any], Verdict]) -> Callable[[Any], Verdict]:
        @functools.wraps(check)
        def judged(answer: Any) -> Verdict:
            try:
                return check(kind.of(answer))
            except NotYet as ending:
                return ending.verdict

        judged.kind = kind  # pyright: ignore[reportAttributeAccessIssue]  # functions have them
        return judged

    return declare


def scored(found: float, par: float, what: str, form: Callable[[Any], str] = "{:,}".format) -> str:
    """A score beside its par, which is what the solution reaches: "13 calls, par 14"."""
    return f"{form(found)} {what}".rstrip() + f", par {form(par)}"
