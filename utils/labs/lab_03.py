"""Checks of lesson and lab 03, "When numbers break"."""

from __future__ import annotations

from typing import Any

from utils.labs.verdict import Verdict, correct, not_yet


def counter_stops(answer: Any) -> Verdict:
    """Lesson 03: counting by one in fp16."""
    if answer == 2048:
        return correct("2,048 + 1 lies between two neighbours and goes back to the even one")
    nudges = {
        1024: "At 1,024 the step is 1: one more still counts.",
        2047: "2,047 + 1 = 2,048 can be held. And then?",
        65504: "That is the largest number. Digits run out long before range.",
    }
    nudge = nudges.get(answer) if isinstance(answer, (int, float)) else None
    return not_yet("the counter stops where n + 1 is n", got=repr(answer),
                   nudge=nudge or "At which number is the step larger than 1?")  # fmt: skip


def smallest_update(answer: Any) -> Verdict:
    """Lesson 03: the smallest power of two that moves a bf16 weight of 64."""
    if answer == 0.5:
        return correct("the step at 64 is 0.5; a quarter is a tie and goes back to the even 64")
    nudges = {
        0.25: "Half a step is a tie: it goes to the even neighbour. Which is that?",
        64 * 2**-8: "Half a step is a tie: it goes to the even neighbour. Which is that?",
        2**-7: "That is the step at 1. At 64 it is larger.",
        1: "That works. Is there a smaller one?",
    }
    nudge = nudges.get(answer) if isinstance(answer, (int, float)) else None
    return not_yet("a power of two is wanted", got=repr(answer),
                   nudge=nudge or "How far is the next number after 64 in bf16?")  # fmt: skip


def skipped_steps(answer: Any) -> Verdict:
    """Lesson 03: halvings from 2^24 to 2^17."""
    if answer == 7:
        return correct("2^24, ..., 2^18 are skipped: seven halvings, and 2^17 works")
    nudge = "2^17 itself works: count the scales above it." if answer in (6, 8) else (
        "Each skip halves the scale. How many halvings from 2^24 to 2^17?")  # fmt: skip
    return not_yet("a number of steps is wanted", got=repr(answer), nudge=nudge)
