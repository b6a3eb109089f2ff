"""What is known of an exercise beside its check: mistakes, and right answers that look unusual.

They stand in a lesson's `mistakes.py`, each with words of the sentence that it earns::

    known = KnownAnswers()

    @known.mistake("largest_batch", "halve the distance")
    def every_batch(peak_bytes_at: Any, limit_bytes: int) -> int: ...

    @known.mistake("largest_batch", "does not fit")
    def one_too_high(solution: Any, *given: Any) -> int:
        return solution(*given) + 1

    known.mistakes("read_timeline", misread_phase=({"phase of the peak": "backward"}, "triangle"))

    known.rights("lean_step", in_128_parts=in_parts(128))

    @known.right("zero_1", "2,448 bytes sent, par 1,632")
    def by_all_reduce(parameters: Any, state: Any, rate: float) -> None: ...

Where the first parameter is called `solution`, it is the lab's own answer; where that is no function,
the mistake is what the call gives. Of an exercise of several parts, a mistake names the parts that
differ from the solution's. `tests/labs/test_exercises.py` tries all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class KnownAnswer:
    """An answer whose verdict is known.

    Args:
        of: The exercise: "saved_bytes".
        name: What the answer is or does.
        given: The answer, a function of the solution, or the parts that differ from the solution's.
        says: Words of its verdict; of a right one they may be empty.
        is_right: Whether the check takes it.
        slow: Whether a try takes so long that only the slow tests make it.
        timeout_seconds: After how long ranks that wait for ever are stopped; 0 for the check's own.
    """

    of: str
    name: str
    given: Any
    says: str = ""
    is_right: bool = False
    slow: bool = False
    timeout_seconds: float = 0.0

    def answer(self, solution: Any) -> Any:
        """What a learner would give to the check."""
        if takes_the_solution(self.given):
            made = functools.partial(self.given, solution)
            return made if callable(solution) else made()
        if isinstance(self.given, Mapping) and isinstance(solution, Mapping):
            return {**solution, **self.given}
        return self.given


@dataclass(frozen=True)
class KnownAnswers:
    """Those of one lab."""

    all: list[KnownAnswer] = field(default_factory=list)

    def mistake(self, of: str, says: str) -> Callable[[Function], Function]:
        """Declare a function or class as a wrong answer that earns these words."""

        def declare(function: Function) -> Function:
            self._add(KnownAnswer(of, function.__name__, function, says))
            return function

        return declare

    def mistakes(
        self, of: str, slow: bool = False, timeout_seconds: float = 0.0, **wrong: tuple[Any, str]
    ) -> None:
        """Declare wrong answers by name, each with its words."""
        for name, (given, says) in wrong.items():
            self._add(KnownAnswer(of, name, given, says, False, slow, timeout_seconds))

    def right(self, of: str, says: str = "") -> Callable[[Function], Function]:
        """Declare a function or class as a right answer, perhaps with words of its note or score."""

        def declare(function: Function) -> Function:
            self._add(KnownAnswer(of, function.__name__, function, says, is_right=True))
            return function

        return declare

    def rights(self, of: str, slow: bool = False, **answers: Any) -> None:
        """Declare right answers by name."""
        for name, given in answers.items():
            self._add(KnownAnswer(of, name, given, is_right=True, slow=slow))

    def _add(self, answer: KnownAnswer) -> None:
        if any((one.of, one.name) == (answer.of, answer.name) for one in self.all):
            raise ValueError(
                f"Exercise {answer.of!r} has two answers called {answer.name!r}. Rename one."
            )
        self.all.append(answer)


def takes_the_solution(given: Any) -> bool:
    """Whether an answer is made from the lab's own: its first parameter is called `solution`."""
    if not inspect.isfunction(given):
        return False
    return next(iter(inspect.signature(given).parameters), "") == "solution"
