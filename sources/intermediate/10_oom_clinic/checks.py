"""Checks of lesson and lab 10, "The out-of-memory clinic"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from utils.clinic import LOSS_TOLERANCE, Examination, Patient, examine
from utils.clinic.lab_ward import (
    CAUSES,
    RESERVED,
    WARD,
    PatientAnswers,
    after_cure,
    as_it_came,
    case_file,
    lab_patient,
)
from utils.labs.cases import Question, judge, scored, takes
from utils.labs.kinds import NotYet, function, keys, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.units import Category, format_bytes

from .seven import NUMBERED
from .watched import Watched, end_of, furthest

CATEGORIES = (*map(str, Category), RESERVED)
SGD_RATE = 0.1

letters = Question(
    "Lesson 10: which of the four causes each of the seven patients has.",
    keys(dict.fromkeys(NUMBERED, one_of("a", "b", "c", "d"))),
    right=dict(zip(NUMBERED, "cdaddcd", strict=True)),
    expected="each one's letter",
    nudge="Which two grow, though their scripts need nothing of earlier steps? Which one's own error says a?",
    note="two leaks, one card in pieces, and four moments that are too large",
)

which_sum = Question(
    "Lesson 10: which of two undetached sums keeps megabytes alive.",
    one_of("total_loss", "total_size", "both"),
    right="total_size",
    wrong={
        "total_loss": "Its graph was run backward, and backward() frees what a graph has saved.",
        "both": "backward() ran through one of the two graphs. What does it free?",
    },
    note="no backward ever runs through its graph, so each step's logits wait for one",
)


def _check(number: int) -> Callable[[dict[str, Any]], Verdict]:
    """The check of one patient of the lab."""

    @takes(
        keys(
            {
                "cause": one_of(*CAUSES),
                "category": one_of(*CATEGORIES, what="a category of bytes"),
                "line": whole("a line number"),
                "cure": function(),
            }
        )
    )
    def patient(answer: dict[str, Any]) -> Verdict:
        return _wrong_diagnosis(number, answer) or _judge_cure(number, answer["cure"])

    # By this name a process of its own finds it.
    patient.__name__ = patient.__qualname__ = f"patient_{number}"
    patient.__doc__ = f"Patient {number}: diagnosis and cure."
    return patient


patient_1, patient_2, patient_3 = _check(1), _check(2), _check(3)
patient_4, patient_5, patient_6, patient_7 = _check(4), _check(5), _check(6), _check(7)


def _wrong_diagnosis(number: int, answer: dict[str, Any]) -> Verdict | None:
    case = WARD[number]
    look = "Examine it: phase, category, what is alive after each step, reserved against alive."
    verdict = judge(
        answer["cause"],
        case.cause,
        "the cause",
        wrong=case.wrong_causes,
        expected="one of the seven",
        nudge=look,
    )
    if verdict:
        return verdict
    if answer["category"] not in case.categories:
        nudge = "Which category is far larger at the peak than a healthy step needs?"
        return not_yet("the category that fills the memory", got=answer["category"], nudge=nudge)
    lines = case_file(number).splitlines()
    if not 1 <= answer["line"] <= len(lines):
        return not_yet(f"the script has lines 1 to {len(lines)}", got=answer["line"])
    line = lines[answer["line"] - 1]
    if not any(text in line for text in case.lines):
        nudge = "Which line makes, or keeps, what fills the memory?"
        return not_yet("the line of the fault", got=line.strip(), nudge=nudge)
    return None


def _judge_cure(number: int, cure: Callable[[Patient], Any]) -> Verdict:
    case, patient = WARD[number], lab_patient(number)
    treated = cure(patient)
    if not isinstance(treated, Patient):
        note = "your function is to return a patient: `return patient.edited({...})`"
        return not_yet(note, got=type(treated).__name__)
    if treated.build is patient.build and treated.train is patient.train:
        return not_yet(
            "the patient came back as it went in", nudge="patient.edited gives a new one."
        )
    if treated.limit_bytes != patient.limit_bytes or treated.fragments != patient.fragments:
        return not_yet("the budget was changed", nudge="A larger card is the last of the cures.")
    after = _examined(treated)
    if verdict := _wrong_cure(case, treated, as_it_came(number), after):
        return verdict
    if case.by_sgd and (problem := _other_under_sgd(patient, treated)):
        nudge = f"AdamW hides how large gradients are; here SGD took its place. {case.other_losses}"
        return not_yet(f"the gradients are not those of before: {problem}", nudge=nudge)
    if verdict := _other_end(case, patient, treated):
        return verdict
    score = scored(after.bytes, after_cure(number).bytes, "after the cure", format_bytes)
    return correct("the same losses, under the budget", score=score)


def _examined(treated: Patient) -> Examination:
    try:
        with Watched() as seen:
            found = examine(treated)
    except ValueError as error:
        if "backward()" not in str(error):
            raise
        nudge = "A step without backward() needs little memory and learns nothing. Which line did you take out?"
        raise NotYet(
            not_yet("your patient no longer trains: no backward() came", nudge=nudge)
        ) from None
    if seen.hidden_bytes:
        size = format_bytes(seen.hidden_bytes)
        nudge = "Arrays and lists are memory too, and no meter of PyTorch's counts them. What goes to the host goes there as a tensor."
        raise NotYet(not_yet(f"{size} of tensors became arrays or lists", nudge=nudge))
    return found


def _other_under_sgd(patient: Patient, treated: Patient) -> str:
    """What differs where plain SGD, which sees the size of gradients, takes the optimizer's place."""
    ends = [end_of(one, SGD_RATE) for one in (patient, treated)]
    return _other_numbers(*[end.losses for end in ends if end]) if all(ends) else ""


def _other_end(case: PatientAnswers, patient: Patient, treated: Patient) -> Verdict | None:
    """What differs beside the losses: what was printed, and weights that were averaged."""
    if not (case.by_print or case.by_weights):
        return None
    before, after = end_of(patient), end_of(treated)
    assert before and after, "without a rate there is an end"
    if problem := _other_numbers(before.numbers, after.numbers):
        nudge = "What the run reports is part of it. Keep the words; let go of what holds memory."
        return not_yet(f"it prints other numbers: {problem}", nudge=nudge)
    if case.by_weights and (far := furthest(before.model, after.model)) > LOSS_TOLERANCE:
        nudge = "Fewer bits for each copy round it, and half of too much stays too much on a smaller card."
        return not_yet(f"the weights differ by {far:.1e} of their size", nudge=nudge)
    return None


def _wrong_cure(
    case: PatientAnswers, treated: Patient, before: Examination, after: Examination
) -> Verdict | None:
    added = "\n".join(line[1:] for line in treated.diff.splitlines() if line.startswith("+"))
    known = next((text for words, text in case.wrong_cures.items() if words in added), "")
    if problem := _other_numbers(before.losses, after.losses):
        return not_yet(
            f"the losses are not those of before: {problem}", nudge=known or case.other_losses
        )
    if not after.fits:
        limit = format_bytes(treated.limit_bytes)
        return not_yet(
            "still over its budget",
            expected=f"at most {limit}",
            got=format_bytes(after.bytes),
            nudge=known or case.still_over,
        )
    return None


def _other_numbers(before: Sequence[float], after: Sequence[float]) -> str:
    if len(before) != len(after):
        return f"{len(after)} numbers where there were {len(before)}"
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if not math.isclose(old, new, rel_tol=LOSS_TOLERANCE, abs_tol=1e-9):
            return f"number {index} is {new:.6g}, and was {old:.6g}"
    return ""
