"""Lesson 20: formats by hand are PyTorch's, bytes held and sent are the formula's, faults are found."""

from __future__ import annotations

import math

import jupytext
import pytest
import torch

from evidence.validation.tables import table
from utils.lessons import folders
from utils.lessons.lesson_20.checks import packed, right_product, right_scales
from utils.lessons.lesson_20.held import (
    compiled_fsdp,
    gathered_on_rank,
    kept_by_swiglu,
    published_gains,
    published_peaks,
    swiglu_gradients,
)
from utils.lessons.lesson_20.kernels import FAULTS, KERNELS, fault_of
from utils.lessons.lesson_20.short_sums import cut, in_14_bits
from utils.lessons.lesson_20.small_model import (
    batches,
    beside_one,
    fresh,
    gradients,
    loss,
    plant,
    spikes,
    unplanted,
)
from utils.ranks import run_ranks

DEFINED = (
    "class Form",
    "def fast",
    "def squares",
    "def parts_of",
    "class KeepsEight",
    "class SmallInside",
    "def gather_small",
    "class Scaler",
)


@pytest.fixture(scope="module")
def page() -> dict[str, object]:
    """What the lesson's cells define: its formats, scales and layers, without its runs."""
    names: dict[str, object] = {}
    cells = jupytext.read(folders()["20"] / "lesson.py").cells
    imports = next(c.source for c in cells if "from dataclasses" in c.source)
    exec(imports, names)
    for cell in cells:
        if cell.cell_type == "code" and any(start in cell.source for start in DEFINED):
            source = cell.source.partition("\nfor ")[0]
            exec(source, names)
        if "FAST = {" in cell.source:
            exec(next(line for line in cell.source.splitlines() if line.startswith("FAST")), names)
    return names


@pytest.mark.parametrize(
    ("name", "dtype"), [("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2)]
)
def test_every_number_of_a_format_and_every_middle_between_two(page, name, dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].unique()
    middles = (every[1:] + every[:-1]) / 2
    form = page[name]
    assert torch.equal(page["rounded"](every, form), every)
    assert torch.equal(page["rounded"](middles, form), middles.to(dtype).float())
    assert form.largest == torch.finfo(dtype).max


def test_e2m1_has_seven_positive_numbers_and_rounds_to_even(page) -> None:
    form = page["E2M1"]
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0, -0.3])
    assert page["rounded"](x, form).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.5]
    by_chance = page["rounded"](torch.full((100_000,), 1.125), form, torch.rand(100_000))
    assert by_chance.unique().tolist() == [1, 1.5]
    assert abs(by_chance.mean().item() - 1.125) < 0.005  # 0.25 of 0.5; 5 standard errors are 0.0034


@pytest.mark.parametrize("block", [None, 16, 32, 128])
def test_scales_of_blocks(page, block: int | None) -> None:
    """The largest number of each block comes back as it was, however large others are."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    parts = x.reshape(1, -1) if block is None else x.unflatten(-1, (-1, block))
    parts *= torch.logspace(-3, 3, parts.shape[-2])[:, None] if block else 1
    x = parts.reshape(8, 256)
    back = page["scaled"](x, page["E4M3"], block)
    found = back.reshape(parts.shape).abs().amax(-1)
    assert torch.allclose(found, parts.abs().amax(-1), rtol=1e-6)
    assert ((back - x).abs() <= x.abs() / 16 + parts.abs().amax() * 2.0**-9 / 448).all()


def test_squares_are_the_same_either_way_round_and_confine_an_outlier(page) -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    x[3, 7] = 1e7
    back = page["squares"](x, page["E4M3"])
    assert torch.equal(page["squares"](x.T, page["E4M3"]), back.T)
    first = page["scaled"](x[:128, :128], page["E4M3"])
    assert torch.equal(back[:128, :128], first) and first.count_nonzero() == 1
    others = back[128:] - x[128:]
    assert others.norm() < 0.05 * x[128:].norm()


def test_powers_of_two_never_cut(page) -> None:
    x = torch.rand(64, 32) * 10
    back = page["scaled"](x, page["E4M3"], 32, page["power_of_two"])
    assert ((back - x).abs() <= x / 16 + 1e-2).all()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(2, 100), "no whole blocks of 32"),
        (torch.tensor([[math.nan] * 32]), "32 numbers are infinite or NaN"),
        (torch.tensor([[math.inf] + [1.0] * 31]), "1 numbers are infinite or NaN"),
    ],
)
def test_what_has_no_scale_is_refused(page, x, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        page["scaled"](x, page["E4M3"], 32)


def test_a_block_of_zeros_stays(page) -> None:
    for scale_as in (page["power_of_two"], page["two_levels"]):
        assert not page["scaled"](torch.zeros(2, 32), page["E2M1"], 16, scale_as).any()
        x = torch.zeros(2, 32)
        x[0, :16] = 1
        assert torch.equal(page["scaled"](x, page["E2M1"], 16, scale_as), x)


def test_zeros_alone_stay_zeros(page) -> None:
    x = torch.zeros(4, 32)
    for per_row in (False, True):
        small, scale = page["parts_of"](x, page["E4M3"], per_row)
        assert torch.equal(small.float() * scale, x)
    assert torch.equal(page["Scaler"](1)(x), x)


@pytest.mark.parametrize(("tokens", "hidden"), [(64, 32), (256, 64)])
def test_bytes_that_a_swiglu_keeps(page, tokens: int, hidden: int) -> None:
    inner = 4 * hidden
    plain = 2 * tokens * hidden + 8 * tokens * inner
    eight = 2 * tokens * (hidden + 4) + 6 * tokens * inner + tokens * (inner + 4)
    assert kept_by_swiglu(torch.nn.functional.linear, tokens, hidden) == plain
    assert kept_by_swiglu(page["KeepsEight"].apply, tokens, hidden) == eight
    inside = 2 * tokens * (hidden + 4) + 2 * tokens * (inner + 4)
    small = page["SmallInside"].apply
    assert kept_by_swiglu(page["KeepsEight"].apply, tokens, hidden, small) == inside


def test_a_swiglu_whose_inside_is_kept_in_eight_bits_has_its_gradients(page) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (16, 64), (16, 64), (32, 64)
    plain = [torch.randn(size, generator=draw, requires_grad=True) for size in sizes]
    small = [each.detach().clone().requires_grad_() for each in plain]
    gate, up, w = plain
    right = (torch.nn.functional.silu(gate) * up) @ w.T
    found = page["SmallInside"].apply(*small)
    assert torch.equal(found, right)
    right.square().sum().backward()
    found.square().sum().backward()
    for a, b in zip(small, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).norm() < 0.1 * b.grad.norm()


def test_gradients_of_a_swiglu_are_autograds_and_off_where_eight_bits_are_kept(page) -> None:
    functional = torch.nn.functional
    right = swiglu_gradients(functional.linear, 64, 32)
    again = swiglu_gradients(
        functional.linear, 64, 32, lambda a, b, w: (functional.silu(a) * b) @ w.T
    )
    small = swiglu_gradients(page["KeepsEight"].apply, 64, 32, page["SmallInside"].apply)
    for name, grad in right.items():
        assert torch.allclose(again[name], grad, rtol=1e-4, atol=1e-4), name
        assert 0.005 < (small[name] - grad).norm() / grad.norm() < 0.1, name


def test_a_number_beside_which_others_are_rounded_comes_back() -> None:
    x, seen = torch.tensor([[1.0, -3.0], [0.5, 1.5]]), []

    def small(y: torch.Tensor) -> torch.Tensor:
        seen.append(y)
        return torch.zeros_like(y)

    assert beside_one(small, 100)(x).tolist() == [[0, -3], [0, 0]]
    assert seen[0].tolist() == [[1, 150], [0.5, 1.5]]


def test_short_sums_cut_toward_zero_and_less_where_they_begin_anew() -> None:
    assert cut(torch.tensor([5.9, -5.9, 0.0]), 3).tolist() == [5, -5, 0]
    a = torch.rand(4, 4096, generator=torch.Generator().manual_seed(0))
    right = a.double() @ a.double().T
    short, moved = in_14_bits(a, a), in_14_bits(a, a, 128)
    assert ((short <= right) & (moved <= right)).all()
    assert (right - moved).norm() < 0.1 * (right - short).norm() < 0.01 * right.norm()
    with pytest.raises(ValueError, match="32 at a time"):
        in_14_bits(a[:, :100], a[:, :100])


def test_published_gains_are_those_of_their_pairs() -> None:
    gains = published_gains()
    assert len(gains) == 15 and all(0 < gain.share < 1 for gain in gains)
    groups = [(gain.before, gain.after) for gain in gains]
    assert groups == sorted(groups, key=groups.index), "a group stands together"
    planned_here = [gain for gain in gains if gain.gpu]
    assert len(planned_here) == 3
    for gain in planned_here:
        assert compiled_fsdp(gain, "fp8") > compiled_fsdp(gain, "bf16") > 0
    first, second = table("torchtitan")[1:3]
    (pair,) = (gain for gain in gains if "torchtitan" in gain.case)
    assert pair.tokens_before == float(first["tps_per_gpu"])
    assert pair.tokens_after == float(second["tps_per_gpu"])
    with pytest.raises(ValueError, match="is no run of eight GPUs"):
        compiled_fsdp(next(gain for gain in gains if not gain.gpu), "fp8")


def test_published_peaks_are_of_pairs_that_gain_and_far_from_a_full_gpu() -> None:
    cases = [gain.case for gain in published_gains() if "a scale a tensor * (torchao)" in gain.case]
    peaks = published_peaks()
    assert {gpus for gpus, _, _ in peaks} == {case.split(", ")[1] for case in cases}
    assert all(abs(small / wide - 1) < 0.02 and wide < 50 for _, wide, small in peaks)


def test_an_outlier_is_planted_in_one_tensor_alone(page) -> None:
    """With `down`'s inputs rounded and nothing else, the planted weights are what they were."""
    seen: list[torch.Size] = []

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append(w.shape)
        return x @ w.T

    pair = batches(1, seed=3)[0]
    found = gradients(fresh(product, 1e5, "down"), [pair])[0]
    assert seen == [torch.Size((128, 384))] * 2, "two layers' `down`, no other"
    assert abs(found - gradients(fresh(), [pair])[0]) < 1e-5


def _gather(shard: torch.Tensor) -> torch.Tensor:
    names: dict[str, object] = {}
    for cell in jupytext.read(folders()["20"] / "lesson.py").cells:
        if "def gather_small" in cell.source or "class Form" in cell.source:
            exec(
                "import torch, torch.distributed as dist\nfrom dataclasses import dataclass", names
            )
            exec(cell.source, names)
    return names["gather_small"](shard)  # type: ignore[operator]


def test_a_gather_in_eight_bits_sends_a_byte_a_number_and_refuses_alike() -> None:
    whole = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    scale = whole.abs().max() / 448
    right = (whole / scale).to(torch.float8_e4m3fn).float() * scale
    for found, sent in run_ranks(gathered_on_rank, 2, _gather, whole):
        assert isinstance(found, torch.Tensor) and torch.equal(found, right)
        assert sent == 512 + 8
    for spoiled in (math.nan, math.inf):
        whole[700] = spoiled  # on rank 1
        said = {text for text, _ in run_ranks(gathered_on_rank, 2, _gather, whole)}
        assert len(said) == 1 and "here or on another rank" in str(said)


def test_what_is_planted_leaves_the_model_as_it_was() -> None:
    pair = batches(1, seed=3)[0]
    plain, right = gradients(fresh(), [pair])
    for factor in (1e4, 1e6):
        assert abs(gradients(fresh(planted=factor), [pair])[0] - plain) < 1e-5
        others = unplanted(gradients(fresh(planted=factor), [pair])[1])
        for name, grad in unplanted(right).items():
            assert torch.allclose(others[name], grad, rtol=1e-3, atol=1e-5), name
    model = fresh()
    plant(model, 64.0, slice(None))
    assert abs(loss(model, pair).item() - plain) < 1e-5
    by_hand, found = gradients(fresh(lambda x, w: x @ w.T), [pair])
    assert abs(by_hand - plain) < 1e-6
    assert all(torch.allclose(found[n], right[n], atol=1e-6) for n in right)


def test_a_stale_scale_is_found_at_the_batch_and_the_layer_of_the_spike(page) -> None:
    late = spikes(lambda: page["Scaler"](1), grows_at=4, back_at=8)
    now = spikes(lambda: page["Scaler"](0), grows_at=4, back_at=8)
    cut = [share for _, _, share in late]
    assert max(cut) == cut[4] > 0.1 and late[4][1].endswith("feedforward.down")
    assert all(share == 0 for _, _, share in now)
    long = spikes(lambda: page["Scaler"](1024), grows_at=4, back_at=8)
    assert long[4][2] > 0.1 and max(long[5][2], long[8][2]) < 0.01, "a first spike alone is cut"
    gaps = [a[0] - b[0] for a, b in zip(late, now, strict=True)]
    assert gaps[4] > 10 * max(abs(gap) for gap in gaps[:4] + gaps[5:])


def test_a_spike_that_returns_is_cut_by_the_short_memory_alone(page) -> None:
    last, long = (
        spikes(lambda n=n: page["Scaler"](n), grows_at=4, back_at=8, again_at=10) for n in (1, 1024)
    )
    assert last[10][2] > 0.1 and last[10][1].endswith("feedforward.down")
    assert long[10][2] < 0.01 < 0.1 < long[4][2]


def test_codes_scales_and_products_of_the_lab() -> None:
    assert packed((1.0, 6.0, -0.5, -0.0)) == (0x72, 0x89)
    assert right_scales([448.0, math.nan, 896.0, 1.0], 1, 1) == (2.0, 2.0, 2.0, 4.0)
    a, b = torch.ones(2, 256), torch.ones(128, 256)
    of_a, of_b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 7.0]])
    assert right_product(a, of_a, b, of_b)[:, 0].tolist() == [128 * 19, 128 * 43]


def test_kernels_differ_by_what_their_evidence_says() -> None:
    assert {fault_of(name) for name in KERNELS} < set(FAULTS)
    x = torch.ones(64, 64)
    x[3, 7] = 2.0**24
    others = {name: (kernel(x) - x).abs() > 0.5 for name, kernel in FAULTS.items()}
    assert others["sound"][3, :32].sum() == 31 and others["sound"].sum() == 31
    assert others["blocks down the columns"][:32, 7].sum() == 31
    assert others["one scale for all"].sum() == 64 * 64 - 1
    block = torch.full((1, 32), 1.0)
    block[0, 0] = 1000.0
    down, up = FAULTS["scale rounded down"](block), FAULTS["sound"](block)
    assert down[0, 0] == 2 * 448 and abs(up[0, 0] / 1000 - 1) < 1 / 16
    y = torch.rand(64, 64) + 1
    assert (FAULTS["cut toward zero"](y) <= y).all() and not (FAULTS["sound"](y) <= y).all()
