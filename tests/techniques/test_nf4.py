"""NF4 and double quantization by hand, against bitsandbytes' operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from utils.techniques import NF4Linear, quantize_nf4
from utils.techniques.bitsandbytes_import import (
    bitsandbytes_library,
    bitsandbytes_problem,
    has_bitsandbytes,
)
from utils.techniques.nf4 import (
    DoubleQuantized,
    dequantize_nf4,
    dynamic_levels,
    nf4_levels,
    pack,
    quantize_blocks,
    unpack,
)

SIZES = [(300, 448), (17, 64), (25, 40)]  # the last one ends in a part of a block


@pytest.fixture(scope="module")
def theirs():
    """bitsandbytes' module of functions."""
    return bitsandbytes_library().functional


def test_the_levels_are_those_of_bitsandbytes(theirs) -> None:
    levels = nf4_levels()
    torch.testing.assert_close(levels, theirs.get_4bit_type("nf4", device="cpu"), rtol=0, atol=3e-7)
    assert levels[7] == 0 and levels[0] == -1 and levels[15] == 1
    assert torch.equal(dynamic_levels(), theirs.create_dynamic_map())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SIZES)
def test_codes_are_identical_and_weights_equal(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    ops = torch.ops.bitsandbytes
    packed, scales = ops.quantize_4bit(weight, 64, "nf4", torch.uint8)
    ours, our_scales = quantize_nf4(weight)
    assert torch.equal(ours, packed.flatten())
    assert torch.equal(our_scales, scales)
    wanted = ops.dequantize_4bit(packed, scales, 64, "nf4", shape, torch.float32)
    torch.testing.assert_close(
        dequantize_nf4(ours, our_scales, shape), wanted, rtol=1e-6, atol=1e-6
    )


def test_double_quantization_is_bitsandbytes_exact_one() -> None:
    torch.manual_seed(0)
    scales = torch.rand(3000) + 1
    found = DoubleQuantized.of(scales)
    quantize = torch.ops.bitsandbytes.quantize_blockwise
    centred = scales - scales.mean()
    # For fp64 bitsandbytes compares with every level; its fast kernel for the CPU may land one
    # level off where a value lies all but halfway between two.
    codes, outer = quantize(centred.double(), dynamic_levels(), 256)
    assert torch.equal(found.codes, codes) and torch.equal(found.outer_scales, outer)
    fast, _ = quantize(centred, dynamic_levels(), 256)
    off = (found.codes.int() - fast.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.01
    wanted = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, outer, dynamic_levels(), 256, torch.float32
    )
    torch.testing.assert_close(found.scales(), wanted + scales.mean(), rtol=1e-6, atol=1e-6)


def test_the_layer_unpacks_to_the_same_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 128)
    layer = NF4Linear(weight)
    by_hand = dequantize_nf4(*quantize_nf4(weight), (96, 128))
    torch.testing.assert_close(layer.unpacked(torch.float32), by_hand, rtol=1e-6, atol=1e-6)


def test_bytes_of_the_parts() -> None:
    packed, scales = quantize_nf4(torch.randn(256, 1024))
    assert packed.nbytes == 256 * 1024 // 2 and scales.nbytes == 256 * 1024 // 64 * 4
    assert DoubleQuantized.of(scales).nbytes == len(scales) + len(scales) // 256 * 4 + 4


def test_pack_and_unpack_an_odd_number() -> None:
    codes = torch.tensor([1, 15, 7], dtype=torch.uint8)
    assert pack(codes).tolist() == [0x1F, 0x70]
    assert torch.equal(unpack(pack(codes))[:3], codes)


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scales = quantize_blocks(torch.zeros(64), nf4_levels(), 64)
    assert not scales.any() and not nf4_levels()[codes.long()].any()


@pytest.fixture
def asked_anew() -> Iterator[None]:
    bitsandbytes_problem.cache_clear()
    yield
    bitsandbytes_problem.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_without_bitsandbytes_the_hand_made_one_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(
        "utils.techniques.bitsandbytes_import.importlib.util.find_spec", lambda name: None
    )
    assert not has_bitsandbytes()
    quantize_nf4(torch.randn(64))
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes"):
        NF4Linear(torch.randn(64, 64))


@pytest.mark.usefixtures("asked_anew")
def test_a_bitsandbytes_that_cannot_be_loaded_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr("utils.techniques.bitsandbytes_import.importlib.import_module", broken)
    assert not has_bitsandbytes()
    with pytest.raises(ModuleNotFoundError, match=r"cannot be loaded \(libcudart.so"):
        bitsandbytes_library()
