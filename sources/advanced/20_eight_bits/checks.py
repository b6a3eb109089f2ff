"""Checks of lesson and lab 20, "Eight bits, and four"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from utils.labs.cases import Case, Exercise, Question, takes
from utils.labs.kinds import function, keys, number, one_of, several, tensor, whole
from utils.labs.verdict import Verdict, correct, not_yet

from .kernels import FAULTS, evidence_of, fault_of

bits_of_mxfp4 = Question(
    "Lesson 20: bits that a number of MXFP4 takes, with its scale.",
    number("a number of bits"),
    right=4.25,
    wrong={
        5: "32 numbers share the scale: a thirty-second of its bits falls to each.",
        12: "32 numbers share one scale.",
        4.5: "That is NVFP4, where 16 share a scale.",
        4: "That is without the scale.",
    },
    nudge="4 bits of its own, and a share of the scale's 8.",
    note="4 + 8 / 32",
    expected="how many bits",
)

received_gb = Question(
    "Lesson 20: GB that a rank of 64 receives of 8 billion weights gathered in E4M3.",
    number("a number of GB"),
    right=7.875,
    wrong={
        8: "Its own 64th is there already.",
        15.75: "That is 16 bits a number.",
        0.125: "That is what the rank holds, and sends. It receives all the others'.",
    },
    within=0.01,
    nudge="A byte a weight, of all shards but its own.",
    note="8 GB x 63 / 64",
    expected="how many GB",
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def code(value: float, *, even: bool = True, sign: bool = True) -> int:
    """The four bits of the nearest number; ties to the even code, or up."""
    size = min(abs(value), E2M1[-1])
    gaps = [abs(size - each) for each in E2M1]
    near = [place for place in range(8) if gaps[place] == min(gaps)]
    place = next((p for p in near if p % 2 == 0), near[0]) if even else near[-1]
    return place + 8 * (sign and math.copysign(1, value) < 0)


def packed(values: tuple[float, ...], *, first_low: bool = True, **how: bool) -> tuple[int, ...]:
    """Two codes a byte."""
    codes = [code(value, **how) for value in values]
    low, high = (codes[::2], codes[1::2]) if first_low else (codes[1::2], codes[::2])
    return tuple(a + 16 * b for a, b in zip(low, high, strict=True))


def _pack_case(values: tuple[float, ...], says: str, nudge: str = "") -> Case:
    wrong = {
        packed(values, first_low=False): "The first of two numbers stands in the low four bits.",
        packed(
            values, even=False
        ): "A number halfway between two goes to the one whose last bit is 0.",
        packed(values, sign=False): "The highest of the four bits is the sign, also of zero.",
    }
    right = packed(values)
    known = {found: text for found, text in wrong.items() if found != right}
    return Case((list(values),), right=right, says=says, wrong=known, nudge=nudge)


pack = Exercise(
    "Exercise 1: numbers to E2M1, two a byte.",
    cases=[
        _pack_case((1.0, 6.0, 3.0, 0.5), "for 1, 6, 3, 0.5"),
        _pack_case((-1.5, 2.0, 4.0, -6.0), "for -1.5, 2, 4, -6"),
        _pack_case((0.6, 1.1, 2.4, 4.6), "for numbers between two"),
        _pack_case((0.25, 0.75, 2.5, 5.0, 1.25, 1.75, 3.5, -5.0), "for numbers halfway"),
        _pack_case((5.3, -5.3), "for numbers between 5 and 6"),
        _pack_case((100.0, -7.0), "for numbers above 6", "What is too large becomes the largest."),
        _pack_case((), "for no numbers"),
    ],
    returns=several(whole(), what="a list of whole numbers, one a byte"),
    nudge="Write the eight sizes in order: the place of the nearest is its code.",
    note="sign, exponent, mantissa; the first number low",
)


def _operands(seed: int, rows: int, columns: int, length: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, length, generator=made) for n in (rows, columns))
    a, b = ((100 * t).to(torch.float8_e4m3fn).float() for t in (a, b))
    scales = torch.rand(rows, length // 128, generator=made) + 0.1
    tiles = torch.rand(columns // 128, length // 128, generator=made) + 0.1
    return a, scales, b, tiles


def right_product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
    """What exercise 2 is to return."""
    tiles = of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a * of_a.repeat_interleave(128, 1)) @ (b * tiles).T


SHAPES = ((4, 128, 128), (6, 256, 128), (5, 128, 384), (130, 384, 256))


@takes(function())
def product_of_blocks(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: a product of numbers in blocks, each with its scales."""
    result = tensor()
    for seed, (rows, columns, length) in enumerate(SHAPES):
        given = _operands(seed, rows, columns, length)
        right, says = right_product(*given), f"a ({rows}, {length}), b ({columns}, {length})"
        found = result.returned(answer(*(t.clone() for t in given))).float()
        if found.shape != right.shape:
            return not_yet(
                f"{says}: the shape is another",
                expected=tuple(right.shape),
                got=tuple(found.shape),
                nudge="A row of the result for each row of a, a column for each row of b.",
            )
        off = ((found - right).norm() / right.norm()).item()
        if not off < 1e-4:
            return not_yet(
                f"{says}: {off:.1%} off", nudge=_product_nudge(found, *given, right=right)
            )
    return correct(f"equal in {len(SHAPES)} shapes")


def _product_nudge(
    found: Tensor, a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, *, right: Tensor
) -> str:
    ones_a, ones_b = torch.ones_like(of_a), torch.ones_like(of_b)
    first_a, first_b = of_a[:, :1].expand_as(of_a), of_b[:, :1].expand_as(of_b)
    top = of_b[:1].expand_as(of_b)
    known = (
        ((a, ones_a, b, ones_b), "No scale is in it."),
        ((a, of_a, b, ones_b), "The scales of b are missing."),
        ((a, ones_a, b, of_b), "The scales of a are missing."),
        ((a, first_a, b, first_b), "Scales change along the sum: no one scale fits all of it."),
        ((a, of_a, b, top), "Rows 128 and up of b have another row of scales."),
        ((a, 1 / of_a, b, 1 / of_b), "A number is its code *times* the scale."),
    )
    for operands, text in known:
        wrong = right_product(*operands)
        if (found - wrong).norm() < 1e-4 * wrong.norm():
            return text
    if not found.isfinite().all():
        return "Some of it is infinite or NaN: which division made it?"
    return "Cut the sum into parts of 128: each has one scale a row of a, one a tile of b."


LARGEST = 448.0


def right_scales(largest: list[float], history: int, margin: int) -> tuple[float, ...]:
    """What exercise 3 is to return."""
    found, seen = [], []
    for now in largest:
        used = max(seen[-history:]) if seen else now if math.isfinite(now) else 0.0
        found.append(used * 2.0**margin / LARGEST if used > 0 else 1.0)
        seen += [now] if math.isfinite(now) else []
    return tuple(found)


def _scales_case(
    largest: list[float], history: int, margin: int, says: str, nudge: str = ""
) -> Case:
    right = right_scales(largest, history, margin)
    known = {}
    if margin:
        less = right_scales(largest, history, -margin)
        known[less] = "A margin leaves room above: it makes the scale larger."
        known[right_scales(largest, history, 0)] = "Where is the margin?"
    if all(map(math.isfinite, largest)):
        now = tuple(
            max(largest[max(0, t + 1 - history) : t + 1]) * 2.0**margin / LARGEST
            for t in range(len(largest))
            if max(largest[: t + 1]) > 0
        )
        known[now] = "The step's own largest is not known yet when its scale is needed."
    if history > 1:
        known[right_scales(largest, 1, margin)] = "That looks at the last step alone."
    never = "That never forgets: only the last `history` steps count."
    known[right_scales(largest, len(largest), margin)] = never
    known = {found: text for found, text in known.items() if found != right}
    return Case((list(largest), history, margin), right=right, says=says, wrong=known, nudge=nudge)


NAN, INFINITE = math.nan, math.inf
delayed_scales = Exercise(
    "Exercise 3: the scale of each step by delayed scaling.",
    cases=[
        _scales_case([448.0, 896.0, 224.0, 448.0], 1, 0, "history 1"),
        _scales_case([448.0, 44800.0, 448.0, 448.0, 448.0, 224.0, 448.0], 3, 0, "history 3"),
        _scales_case([448.0, 224.0, 112.0, 448.0], 2, 2, "history 2, margin 2"),
        _scales_case(
            [448.0, NAN, 896.0, INFINITE, 448.0],
            2,
            0,
            "history 2, with NaN and infinity",
            "A step that is not finite leaves no trace: the two finite ones before count.",
        ),
        _scales_case(
            [NAN, 448.0, 448.0],
            2,
            0,
            "NaN at the first step",
            "With no finite number seen yet the scale is 1.",
        ),
        _scales_case(
            [0.0, 0.0, 448.0, 448.0],
            1,
            0,
            "a tensor of zeros",
            "Zeros need no scale: it is 1, so that nothing is divided by 0.",
        ),
    ],
    returns=several(number(), what="a list of scales, one a step"),
    nudge="Which steps are over when step t needs its scale? Take the largest of the last of them.",
    note="from finished steps alone, finite ones",
    relative=1e-9,
)


@takes(keys(dict.fromkeys("ABCD", one_of(*FAULTS, what="one of FAULTS"))))
def diagnosis(answer: Mapping[str, str]) -> Verdict:
    """Exercise 4: what is wrong with each kernel."""
    wrong = [name for name in answer if answer[name] != fault_of(name)]
    if wrong:
        name = wrong[0]
        nudge = f"With {answer[name]!r} you would see: {evidence_of(answer[name])}. Do you?"
        return not_yet(f"{4 - len(wrong)} of 4 are right; look at kernel {name} again", nudge=nudge)
    return correct("; ".join(f"{name}: {evidence_of(fault_of(name))}" for name in "ABCD"))
