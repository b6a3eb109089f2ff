"""Weights in few bits by hand: grids, GPTQ, AWQ and eight bits, against definitions and libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from utils.lessons.lesson_08.awq import REACHES, awq, clipped_to_nearest, column_scales
from utils.lessons.lesson_08.gptq import gptq, inverse_factor
from utils.lessons.lesson_08.int8 import (
    Int8Weight,
    absmax,
    from_absmax,
    int8_product,
    split_product,
)
from utils.lessons.lesson_08.packed_linear import (
    PackedLinear,
    pack_codes,
    pack_linears,
    unpack_codes,
)
from utils.lessons.lesson_08.rounding import Grid, output_error, round_to_nearest, second_moments
from utils.techniques import nf4
from utils.techniques.bitsandbytes_import import has_bitsandbytes


def layer(seed: int, rows: int = 48, width: int = 64) -> tuple[Tensor, Tensor]:
    """A weight and inputs whose channels hang together and differ in size, as in a real model."""
    torch.manual_seed(seed)
    mixed = torch.randn(width, width) / width**0.5
    inputs = torch.randn(512, width) @ mixed * torch.rand(width).mul(2).exp()
    return torch.randn(rows, width) * 0.02, inputs


@settings(max_examples=30)
@given(st.integers(2, 8), st.sampled_from([8, 16, None]), st.integers(0, 99))
def test_no_weight_moves_by_more_than_a_step(bits: int, group: int | None, seed: int) -> None:
    weight, _ = layer(seed)
    made = round_to_nearest(weight, bits, group)
    steps = made.scales.repeat_interleave(64 // made.scales.shape[1], dim=1)
    away = (made.weight() - weight).abs()
    # Half a step, but where the zero point was rounded: there the end of the reach is clipped.
    assert (away <= 1.01 * steps).all(), "a weight moved by more than a step"
    assert (away <= 0.51 * steps).float().mean() > 0.9, "most weights go to their nearest neighbour"


def test_zero_stays_zero():
    weight = torch.tensor([[0.5, 0.0, 1.0, 0.25], [-3.0, 0.0, -1.0, -0.5]])
    assert (round_to_nearest(weight, 3).weight()[:, 1] == 0).all(), "0 is on every grid"


def test_what_is_stored_is_what_the_format_takes():
    weight, _ = layer(0, 48, 64)
    stored = round_to_nearest(weight, 4, 32)
    # 48 x 64 codes of 4 bits; 48 x 2 groups, each a scale of 16 bits and a zero point of 4.
    assert stored.stored_bytes == (48 * 64 * 4 + 48 * 2 * (16 + 4)) / 8, "codes, scales, zeros"
    packed = PackedLinear(stored)
    held = sum(part.nbytes for part in packed.buffers())
    assert held == stored.stored_bytes, "what is packed is what the format takes"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_calibration_lowers_the_error_of_the_output(bits, group, seed):
    weight, inputs = layer(seed)
    moments, magnitudes = second_moments(inputs), inputs.abs().mean(dim=0)
    nearest, by_gptq, by_awq = (
        output_error(weight, made.weight(), moments)
        for made in (
            round_to_nearest(weight, bits, group),
            gptq(weight, moments, bits, group),
            awq(weight, moments, magnitudes, bits, group),
        )
    )
    assert by_gptq < nearest, f"GPTQ {by_gptq:.4f}, plain rounding {nearest:.4f}"
    assert by_awq < nearest, f"AWQ {by_awq:.4f}, plain rounding {nearest:.4f}"


def test_the_error_from_moments_is_the_error_of_the_output():
    weight, inputs = layer(0)
    stored = round_to_nearest(weight, 4).weight()
    plain = ((weight - stored) @ inputs.T).norm() / (weight @ inputs.T).norm()
    assert output_error(weight, stored, second_moments(inputs)) == pytest.approx(
        plain.item(), rel=1e-4
    ), "the second moments are all that the error needs"


def test_gptq_of_independent_inputs_is_plain_rounding():
    """Where no input says anything about another there is nothing to make up for."""
    weight, _ = layer(1)
    found = gptq(weight, torch.diag(torch.rand(64) + 0.5), 4, 32)
    plain = round_to_nearest(weight, 4, 32)
    assert torch.equal(found.codes, plain.codes), "nothing moved"


def test_gptq_is_optimal_brain_quantization_in_a_fixed_order():
    """The paper's equation 2, one column after the other, with the inverse taken anew each time."""
    weight, inputs = layer(2, 8, 12)
    moments = second_moments(inputs).double()
    damped = moments + 0.01 * moments.diagonal().mean() * torch.eye(12)
    left, stored = weight.double().clone(), torch.empty(8, 12, dtype=torch.float64)
    grid = Grid.of(weight, 3)
    for column in range(12):
        here = left[:, column : column + 1].float()
        stored[:, column] = grid.weight(grid.codes(here)).squeeze(1)
        inverse = torch.linalg.inv(damped[column:, column:])
        error = (left[:, column] - stored[:, column]) / inverse[0, 0]
        left[:, column:] -= torch.outer(error, inverse[0])
    torch.testing.assert_close(gptq(weight, moments.float(), 3).weight(), stored.float())


def test_an_input_that_never_came_gets_no_say():
    weight, inputs = layer(3)
    inputs[:, 5] = 0
    made = gptq(weight, second_moments(inputs), 4, 32)
    assert made.weight().isfinite().all(), "its moment of 0 has no inverse"
    assert (made.weight()[:, 5] == 0).all(), "any weight does there, 0 as well"


def test_scaling_columns_changes_nothing_before_rounding():
    weight, inputs = layer(4)
    scales = column_scales(inputs.abs().mean(dim=0), 0.5)
    torch.testing.assert_close((inputs / scales) @ (weight * scales).T, inputs @ weight.T)
    middle = (scales.max() * scales.min()).item()
    assert middle == pytest.approx(1, rel=1e-2), "neither all wider nor all narrower"


def test_awq_is_never_worse_than_plain_rounding() -> None:
    weight, inputs = layer(5)
    moments = second_moments(inputs)
    made = awq(weight, moments, torch.ones(64), 4, 32)  # all inputs alike: no power to choose
    plain = output_error(weight, round_to_nearest(weight, 4, 32).weight(), moments)
    assert made.power == 0, "plain rounding is among the tries"
    assert output_error(weight, made.weight(), moments) <= plain, "clipping is taken if it helps"


def test_a_group_s_reach_is_the_best_of_ten() -> None:
    weight, inputs = layer(5, 4, 8)
    moments = second_moments(inputs)
    made = clipped_to_nearest(weight, moments, 3)
    tried = [Grid.of(reach * weight, 3) for reach in REACHES]
    rows = [
        [
            output_error(weight[r : r + 1], g.weight(g.codes(weight))[r : r + 1], moments)
            for r in range(4)
        ]
        for g in tried
    ]
    for row, best in enumerate(min(found) for found in zip(*rows, strict=True)):
        mine = output_error(weight[row : row + 1], made.weight()[row : row + 1], moments)
        assert mine == pytest.approx(best, rel=1e-4), "with one group a row the choice is exact"


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(0, 70), st.integers(0, 99))
def test_packed_codes_come_back(bits: int, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert len(packed) == -(-count * bits // 8), "no gaps between codes"
    assert torch.equal(unpack_codes(packed, bits, count), codes), "what was packed comes back"


def test_four_bits_are_packed_as_in_lesson_06() -> None:
    codes = torch.randint(0, 16, (64,), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes, 4), nf4.pack(codes)), "the first code in the upper half"


@pytest.mark.parametrize(
    "method",
    [
        lambda w, h, m: round_to_nearest(w, 3, 32),
        lambda w, h, m: gptq(w, h, 3, 32),
        lambda w, h, m: awq(w, h, m, 3, 32),
    ],
)
def test_a_packed_layer_computes_what_was_rounded(method: Any) -> None:
    weight, inputs = layer(8)
    made = method(weight, second_moments(inputs), inputs.abs().mean(dim=0))
    packed = PackedLinear(made, bias=torch.arange(48.0))
    right = inputs @ made.weight().T + torch.arange(48.0)
    torch.testing.assert_close(packed(inputs), right, rtol=1e-4, atol=1e-4)


def test_a_packed_layer_refuses_to_train() -> None:
    weight, _ = layer(9)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    pack_linears(model, {"0": round_to_nearest(weight, 4, 32)})
    assert not model.training, "it comes back ready to serve"
    with pytest.raises(RuntimeError, match=r"no gradient\. Call model\.eval"):
        model.train()
    assert model.eval()[0].extra_repr().endswith("bits=4, groups=2")


def test_what_cannot_be_packed_is_refused() -> None:
    weight, _ = layer(9)
    with pytest.raises(TypeError, match="Int8Weight cannot be packed"):
        PackedLinear(Int8Weight.of(weight))
    with pytest.raises(TypeError, match="not a linear layer"):
        pack_linears(torch.nn.Sequential(torch.nn.ReLU()), {"0": round_to_nearest(weight, 4)})


def test_whole_numbers_are_multiplied_exactly():
    x, weight = torch.tensor([[127.0, -64.0, 3.0]]), torch.tensor([[127.0, 1.0, -5.0]])
    assert int8_product(x, weight).item() == 127 * 127 - 64 - 15, "both rows reach 127: no rounding"


def test_an_outlier_drowns_its_row_and_the_split_saves_it():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(32, 128) * 0.05
    x[:, 7] = 60 * x[:, 7].sign()
    right = x @ weight.T
    whole, split = (
        ((made - right).norm() / right.norm()).item()
        for made in (int8_product(x, weight), split_product(x, weight, weight))
    )
    assert split < whole / 5, f"split {split:.4f}, whole {whole:.4f}"


def outlier_in_small_weights() -> tuple[Tensor, Tensor]:
    """An input channel that is thirty times larger, and weights that are thirty times smaller."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(32, 128) * 0.05
    x[:, 7] *= 30
    weight[:, 7] /= 30
    return x, weight


def test_columns_from_codes_are_further_off_than_in_full() -> None:
    x, weight = outlier_in_small_weights()
    right = x @ weight.T
    whole, codes, full = (
        ((made - right).norm() / right.norm()).item()
        for made in (
            int8_product(x, weight),
            split_product(x, weight),
            split_product(x, weight, weight),
        )
    )
    assert 1.5 * full < codes < whole / 1.5, (
        f"whole {whole:.4f}, codes {codes:.4f}, full {full:.4f}"
    )


@pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
def test_the_split_is_that_of_bitsandbytes() -> None:
    import bitsandbytes as library

    x, weight = (part.half() for part in outlier_in_small_weights())
    state = library.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, False
    state.CB, state.SCB, _ = library.functional.int8_vectorwise_quant(weight)
    theirs = library.matmul(x, weight, state=state).float()
    codes, full = (
        ((made - theirs).norm() / theirs.norm()).item()
        for made in (
            split_product(x, weight.float()),
            split_product(x, weight.float(), weight.float()),
        )
    )
    assert codes < full / 2, f"from codes {codes:.4f} away, with columns in full {full:.4f}"


@pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
def test_codes_are_those_of_bitsandbytes() -> None:
    import bitsandbytes.functional as library

    weight, _ = layer(6)
    codes, scales, _ = library.int8_vectorwise_quant(weight.half())
    ours, our_scales = absmax(weight.half())
    assert torch.equal(ours, codes), "int8: the same codes"
    torch.testing.assert_close(our_scales, scales.float(), rtol=0, atol=0)
    packed, state = library.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    made = nf4.Nf4Weight.of(weight)
    assert torch.equal(made.packed.flatten(), packed.flatten()), "NF4: the same codes"
    torch.testing.assert_close(made.scales, state.absmax, rtol=0, atol=0)
    assert made.stored_bytes == 48 * 64 * 4.5 / 8, "4 bits and a scale of 32 for each 64"
    torch.testing.assert_close(from_absmax(ours, our_scales), weight, atol=6e-4, rtol=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w, h: round_to_nearest(w, 9), "takes 2 to 8"),
        (lambda w, h: round_to_nearest(w, 4, 0), "does not divide"),
        (lambda w, h: pack_codes(torch.tensor([8], dtype=torch.uint8), 3), "does not fit into 3"),
        (lambda w, h: round_to_nearest(w, 4, 48), "Take 32 or 64"),
        (lambda w, h: gptq(w, h[:8, :8], 4), "this very layer"),
        (lambda w, h: inverse_factor(h, 32), "this very layer"),
        (lambda w, h: awq(w, h, torch.ones(8), 4), "64 inputs"),
        (lambda w, h: second_moments(torch.empty(0, 64)), "empty or not finite"),
        (lambda w, h: second_moments(torch.full((2, 64), torch.nan)), "empty or not finite"),
    ],
)
def test_bad_input_ends_in_a_sentence(call, says):
    weight, inputs = layer(0)
    with pytest.raises(ValueError, match=says):
        call(weight, second_moments(inputs))


def test_the_factor_is_of_the_inverse():
    _, inputs = layer(7)
    moments = second_moments(inputs)
    factor = inverse_factor(moments, 64).double()
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(64)
    torch.testing.assert_close(
        factor.T @ factor @ damped, torch.eye(64).double(), atol=1e-4, rtol=0
    )
