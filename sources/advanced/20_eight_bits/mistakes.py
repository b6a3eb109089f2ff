"""Answers to the exercises of lab 20 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.labs.mistakes import KnownAnswers

from .checks import packed, right_product, right_scales
from .kernels import fault_of

known = KnownAnswers()
known.mistakes("bits_of_mxfp4", eight=(8.25, "a share of the scale's 8"), no_scale=(4, "without"))
known.mistakes("received_gb", own_too=(8, "own 64th"), in_bf16=(15.75, "16 bits"))

known.mistakes(
    "pack",
    first_high=(lambda v: packed(v, first_low=False), "in the low four bits"),
    ties_up=(lambda v: packed(v, even=False), "whose last bit is 0"),
    no_sign=(lambda v: packed(v, sign=False), "is the sign"),
    one_a_byte=(lambda v: [code for b in packed(v) for code in (b % 16, b // 16)], "Write the"),
    floats=(lambda v: [b + 0.5 for b in packed(v)], "A whole number"),
    no_return=(lambda v: None, "returns nothing"),
)


@known.right("pack")
def by_sizes(values: list[float]) -> list[Any]:
    """Thresholds in place of a search; numpy's numbers."""
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = []
    for value in values:
        size = abs(value)
        place = sum(size > h if i % 2 == 0 else size >= h for i, h in enumerate(halves))
        codes.append(np.uint8(place + 8 * (math.copysign(1, value) < 0)))
    return [low | (high << 4) for low, high in zip(codes[::2], codes[1::2], strict=True)]


known.mistakes(
    "product_of_blocks",
    no_scales=(lambda a, x, b, y: a @ b.T, "No scale"),
    a_alone=(lambda a, x, b, y: right_product(a, x, b, torch.ones_like(y)), "of b are missing"),
    b_alone=(lambda a, x, b, y: right_product(a, torch.ones_like(x), b, y), "of a are missing"),
    one_scale=(
        lambda a, x, b, y: (a @ b.T) * x[:, :1] * y[:, 0].repeat_interleave(128),
        "no one scale fits",
    ),
    first_tile=(
        lambda a, x, b, y: right_product(a, x, b, y[:1].expand_as(y)),
        "another row of scales",
    ),
    divided=(lambda a, x, b, y: right_product(a, 1 / x, b, 1 / y), "*times* the scale"),
    turned=(lambda a, x, b, y: right_product(a, x, b, y).T, "A row of the result"),
    no_return=(lambda a, x, b, y: None, "returns nothing"),
)


@known.right("product_of_blocks")
def by_einsum(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
    """All blocks at once, in fp64."""
    a, b = (t.double().unflatten(-1, (-1, 128)) for t in (a, b))
    return torch.einsum(
        "mkc,nkc,mk,nk->mn", a, b, of_a.double(), of_b.double().repeat_interleave(128, 0)
    )


def last_only(largest: list[float], history: int, margin: int) -> Any:
    return right_scales(largest, 1, margin)


def with_its_own(largest: list[float], history: int, margin: int) -> Any:
    return [
        max(largest[max(0, t + 1 - history) : t + 1]) * 2.0**margin / 448
        for t in range(len(largest))
    ]


def keeps_nan(largest: list[float], history: int, margin: int) -> Any:
    found = []
    for t, now in enumerate(largest):
        used = max(largest[max(0, t - history) : t]) if t else now
        found.append(used * 2.0**margin / 448 if used else 1.0)
    return found


def divides_by_zero(largest: list[float], history: int, margin: int) -> Any:
    scales = right_scales(largest, history, margin)
    return [0.0 if not any(largest[:t]) and t else s for t, s in enumerate(scales)]


known.mistakes(
    "delayed_scales",
    last_only=(last_only, "the last step alone"),
    own_step=(with_its_own, "not known yet"),
    never_forgets=(lambda v, n, m: right_scales(v, 10**6, m), "never forgets"),
    margin_turned_round=(lambda v, n, m: right_scales(v, n, -m), "makes the scale larger"),
    no_margin=(lambda v, n, m: right_scales(v, n, 0), "Where is the margin"),
    keeps_nan=(keeps_nan, "leaves no trace"),
    a_number=(lambda v, n, m: 1.0, "a list of scales"),
    no_return=(lambda v, n, m: None, "returns nothing"),
)


@known.right("delayed_scales")
def by_deque(largest: list[float], history: int, margin: int) -> list[Any]:
    seen: deque[float] = deque(maxlen=history)
    found = []
    for now in largest:
        finite = now if math.isfinite(now) else 0.0
        used = max(seen, default=finite)
        found.append(np.float64(used * 2.0**margin / 448 or 1.0))
        if math.isfinite(now):
            seen.append(now)
    return found


RIGHT = {name: fault_of(name) for name in "ABCD"}
known.mistakes(
    "diagnosis",
    swapped=(RIGHT | {"A": RIGHT["B"], "B": RIGHT["A"]}, "kernel A"),
    all_scales=(RIGHT | {"A": "one scale for all"}, "changes every other block"),
    all_sound=(dict.fromkeys("ABCD", "sound"), "at most 6.25% off"),
    no_fault=(RIGHT | {"D": "fp8"}, "one of FAULTS"),
)
known.rights("diagnosis", in_capitals={name: fault.upper() for name, fault in RIGHT.items()})
