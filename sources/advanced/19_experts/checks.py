"""Checks of lesson and lab 19, "Experts"."""

from __future__ import annotations

from utils.labs.cases import Case, Exercise, Question
from utils.labs.kinds import number

states_gb = Question(
    "Lesson 19: GB of parameters, gradients and states of Qwen3-30B-A3B, Adam at 16 bytes a parameter.",
    number("a number of GB"),
    right=16 * 30.532,
    relative=0.02,
    wrong={
        16 * 3.35: "Those are the parameters that one token uses. Which of the others have no gradient over a batch?",
        2 * 30.5: "That is the parameters alone, in 16 bits.",
        12 * 30.5: "That is Adam's share: add parameters and gradients in 16 bits, 4 bytes more.",
    },
    nudge="Every parameter that is held has a gradient and states: 16 bytes each.",
    note="16 bytes x 30.5 x 10^9, 9 times those of a dense model of its arithmetic",
)

state_bytes = Exercise(
    "Exercise 1: bytes of parameters, gradients and Adam's moments.",
    cases=[Case((1000,), right=16_000, says="for 1000 parameters")],
    nudge="Which tensors of the parameters' size does a step with Adam keep?",
    note="4 bytes each for parameter, gradient and two moments",
)
