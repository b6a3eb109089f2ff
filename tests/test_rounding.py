"""Weights in few bits by hand: grids, GPTQ, AWQ and eight bits, against definitions and libraries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from utils.techniques.awq import awq, column_scales
from utils.techniques.gptq import gptq, inverse_factor
from utils.techniques.int8 import absmax, from_absmax, int8_product, split_product
from utils.techniques.library import has_bitsandbytes
from utils.techniques.rounding import Grid, output_error, round_to_nearest, second_moments


def layer(seed: int, rows: int = 48, width: int = 64) -> tuple[Tensor, Tensor]:
    """A weight and inputs whose channels hang together and differ in size, as in a real model."""
    torch.manual_seed(seed)
    mixed = torch.randn(width, width) / width**0.5
    inputs = torch.randn(512, width) @ mixed * torch.rand(width).mul(2).exp()
    return torch.randn(rows, width) * 0.02, inputs


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.sampled_from([8, 16, None]), st.booleans(), st.integers(0, 99))
def test_no_weight_moves_by_more_than_half_a_step(bits, group, symmetric, seed):
    weight, _ = layer(seed)
    stored = round_to_nearest(weight, bits, group, symmetric)
    steps = stored.scales.repeat_interleave(stored.group, dim=1)
    away = (stored.weight() - weight).abs()
    # The zero point is rounded too, and a symmetric grid has one step more below than above.
    reach = 1.001 if symmetric else 1.0
    assert (away <= reach * steps).all(), "a weight moved by more than a step"
    assert (away <= 0.501 * steps).float().mean() > 0.9, "most weights go to their nearest neighbour"


def test_zero_stays_zero():
    weight = torch.tensor([[0.5, 0.0, 1.0, 0.25], [-3.0, 0.0, -1.0, -0.5]])
    assert (round_to_nearest(weight, 3).weight()[:, 1] == 0).all(), "0 is on every grid"


def test_what_is_stored_is_what_the_format_takes():
    weight, _ = layer(0, 48, 64)
    stored = round_to_nearest(weight, 4, 32)
    # 48 x 64 codes of 4 bits; 48 x 2 groups, each a scale of 16 bits and a zero point of 4.
    assert stored.stored_bytes == (48 * 64 * 4 + 48 * 2 * (16 + 4)) / 8, "codes, scales, zeros"
    plain = round_to_nearest(weight, 4, 32, symmetric=True)
    assert plain.stored_bytes == (48 * 64 * 4 + 48 * 2 * 16) / 8, "a symmetric grid has no zeros"


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
    assert middle == pytest.approx(1, rel=1e-5), "neither all wider nor all narrower"


def test_awq_is_never_worse_than_plain_rounding():
    weight, inputs = layer(5)
    moments = second_moments(inputs)
    flat = awq(weight, moments, torch.ones(64), 4, 32)  # all inputs alike: nothing to choose
    assert flat.power == 0, "plain rounding is among the tries"
    assert torch.equal(flat.weight(), round_to_nearest(weight, 4, 32).weight())


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
        for made in (int8_product(x, weight), split_product(x, weight))
    )
    assert split < whole / 5, f"split {split:.4f}, whole {whole:.4f}"


@pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
def test_codes_are_those_of_bitsandbytes():
    import bitsandbytes.functional as library

    weight, _ = layer(6)
    codes, scales, _ = library.int8_vectorwise_quant(weight.half())
    ours, our_scales = absmax(weight.half())
    assert (ours.int() - codes.int()).abs().max() <= 1, "a code differs by more than a rounding"
    assert (ours == codes).float().mean() > 0.995, "codes differ in more than halves of a step"
    torch.testing.assert_close(our_scales, scales.float())
    torch.testing.assert_close(from_absmax(ours, our_scales), weight, atol=6e-4, rtol=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w, h: round_to_nearest(w, 9), "takes 2 to 8"),
        (lambda w, h: round_to_nearest(w, 4, 48), "Take 32 or 64"),
        (lambda w, h: gptq(w, h[:8, :8], 4), "this very layer"),
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
    factor = inverse_factor(moments, 0.01).double()
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(64)
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(64).double(), atol=1e-4, rtol=0)
