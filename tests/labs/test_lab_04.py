"""Lab 04's checks leave no process behind, whatever the answer does."""

from __future__ import annotations

import os

from lab_answers import solution
from lab_cases import nudged
from rank_cases import nothing_left

from utils.labs.verdict import Status
from utils.lessons.lesson_04 import checks as lab_04
from utils.lessons.lesson_04.mistakes import by_hand, die
from utils.ranks import run_ranks


def test_ranks_that_end_by_themselves_or_not_leave_nothing() -> None:
    run_ranks(os.getpid, 1)  # the server is meant to stay
    with nothing_left():
        nudged(lab_04.by_hand(by_hand(average_gradients=die)), "rank 2 ended by itself")
        assert lab_04.by_hand(solution("04.by_hand")).status is Status.CORRECT
