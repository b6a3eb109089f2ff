"""Checks of lesson and lab 19, "Experts"."""

from __future__ import annotations

from utils.labs.cases import Case, Exercise, Question
from utils.labs.kinds import number

two_moments = Question(
    "Lesson 19: Adam's two moments of 2 x 1,024 x 1,024 parameters, in MiB.",
    number("a number of MiB"),
    right=16,
    wrong={8: "That is one moment. Adam keeps two for each parameter."},
    nudge="How many numbers does Adam keep for each parameter, of how many bytes?",
    note="2 x 4 bytes x 2 x 1,024 x 1,024",
)

state_bytes = Exercise(
    "Exercise 1: bytes of parameters, gradients and Adam's moments.",
    cases=[
        Case(
            (1000,),
            right=16_000,
            says="for 1000 parameters",
            wrong={4000: "That counts numbers. Each takes four bytes."},
        ),
        Case((0,), right=0, says="for a model without parameters"),
    ],
    nudge="Which tensors of the parameters' size does a step with Adam keep?",
    note="4 bytes each for parameter, gradient and two moments",
)
