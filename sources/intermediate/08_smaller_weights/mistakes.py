"""Answers to the exercises of lab 08 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from utils.labs.mistakes import KnownAnswers

from .gptq import gptq, inverse_factor
from .library_text import calibration_tokens
from .rounding import Grid, Rounded, round_to_nearest

known = KnownAnswers()
known.mistakes("independent_inputs", ten=(10, "diagonal"), a_hundred=(100, "diagonal"))


def parts(made: Rounded) -> tuple[Tensor, Tensor, Tensor]:
    return made.codes, made.scales, made.zeros


def by_activation(
    static: bool = True, put_back: bool = True, inverse: bool = True
) -> Callable[[Tensor, Tensor], Any]:
    def few_bits(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = moments.diagonal().argsort(descending=True)
        ordered = moments[order][:, order]
        factor = (
            inverse_factor(ordered, len(order))
            if inverse
            else torch.linalg.cholesky(ordered + torch.eye(len(order)), upper=True)
        )
        moving, codes = weight[:, order].clone(), torch.empty_like(weight)
        grids = [Grid.of(part, 3) for part in weight.split(32, dim=1)]
        for place, column in enumerate(order.tolist()):
            if not static and place % 32 == 0:
                grids[place // 32] = Grid.of(moving[:, place : place + 32], 3)
            grid = grids[column // 32]
            here = slice(place, place + 1)
            code = grid.codes(moving[:, here])
            codes[:, column if put_back else place] = code[:, 0]
            error = (moving[:, here] - grid.weight(code)) / factor[place, place]
            moving[:, place + 1 :] -= error * factor[here, place + 1 :]
        return (
            codes,
            torch.cat([g.scales for g in grids], 1),
            torch.cat([g.zeros for g in grids], 1),
        )

    return few_bits


def with_nan(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = parts(round_to_nearest(weight, 3, 32))
    return codes, scales * torch.nan, zeros


known.mistakes(
    "few_bits",
    to_nearest=(lambda w, h: parts(round_to_nearest(w, 3, 32)), "rounding to nearest"),
    left_to_right=(lambda w, h: parts(gptq(w, h, 3, 32)), "left to right"),
    not_put_back=(by_activation(put_back=False), "in which they came"),
    moving_grids=(by_activation(static=False), "own group's grid"),
    no_inverse=(by_activation(inverse=False), "inverse"),
    four_bits=(lambda w, h: parts(gptq(w, h, 4, 32)), "Clamp"),
    larger_groups=(lambda w, h: parts(gptq(w, h, 3, 64)), "for each group"),
    weights_for_codes=(lambda w, h: (w, *parts(gptq(w, h, 3, 32))[1:]), "not a code"),
    with_nan=(with_nan, "Damping"),
    the_weight=(lambda w, h: gptq(w, h, 3, 32).weight(), "codes, scales and zeros"),
    no_return=(lambda w, h: None, "return"),
)


@known.right("few_bits")
def other_number_types(weight: Tensor, moments: Tensor) -> list[Tensor]:
    codes, scales, zeros = by_activation()(weight, moments)
    return [codes.to(torch.int64), scales.double(), zeros.to(torch.uint8)]


def in_order(table: Any, budget: float) -> dict[str, int]:
    bits, spent = dict.fromkeys(table, 2), sum(row[2][0] for row in table.values())
    for path, row in table.items():
        if spent + row[3][0] - row[2][0] <= budget:
            bits[path], spent = 3, spent + row[3][0] - row[2][0]
    return bits


known.mistakes(
    "spend_bits",
    alike_everywhere=(lambda table, budget: dict.fromkeys(table, 2), "same bits everywhere"),
    bytes_left=(lambda table, budget: {**dict.fromkeys(table, 2), min(table): 3}, "are left"),
    over_the_budget=(lambda table, budget: dict.fromkeys(table, 8), "Add up"),
    five_bits=(lambda table, budget: dict.fromkeys(table, 5), "four choices"),
    nothing=(lambda table, budget: {}, "There is no"),
    a_list=(lambda table, budget: [2] * 28, "a dict"),
)
known.mistakes("spend_bits", slow=True, in_order=(in_order, "loss_with"))


def hex_dump() -> Tensor:
    digits = torch.tensor(list(b"0123456789ABCDEF"))
    return digits[torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(0))]


known.mistakes(
    "wrong_text",
    the_right_text=(calibration_tokens, "no text at all"),
    short=(lambda: torch.zeros(4, 5, dtype=torch.long), "A batch of sequences"),
    above_a_byte=(lambda: torch.full((4, 128), 300), "reads bytes"),
    no_whole_numbers=(lambda: torch.rand(4, 128), "reads bytes"),
)
known.mistakes("wrong_text", slow=True, hex_dump=(hex_dump, "not bad enough"))
known.mistakes(
    "diagnosis",
    same_kind=({"same kind shows it": "yes"}, "this kind of text"),
    weights=({"what shows it": "the layers' weights"}, "also in a good one"),
    more_of_the_same=({"what shows it": "more of the same text"}, "Whom"),
)


def counting(up: bool = True, skip: bool = False, strict: bool = False, whole: bool = True) -> Any:
    def admitted(card: int, weights: int, token: int, lengths: list[int], block: int) -> int:
        room = (card - weights) / (token * block)
        room, count = (room // 1 if whole else room), 0
        for length in lengths:
            need = -(-length // block) if up else length / block
            if need < room or (need == room and not strict):
                room, count = room - need, count + 1
            elif not skip:
                break
        return count

    return admitted


known.mistakes(
    "admitted",
    rounded_down=(counting(up=False), "two blocks"),
    skips=(counting(skip=True), "None is passed over"),
    below_the_limit=(counting(strict=True), "to the last byte"),
    blocks_of_16=(lambda *given: counting()(*given[:4], 16), "one token"),
    no_return=(lambda *given: None, "return"),
)
known.rights("admitted", block_by_block=counting())
