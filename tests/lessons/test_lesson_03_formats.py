"""Formats against PyTorch's own: every bit pattern of 8 and 16 bits, and rounding to them."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.lessons.lesson_03.number_formats import FORMATS, NumberFormat

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
IN_TORCH = {"fp32": torch.float32} | DTYPES


@pytest.mark.parametrize("name", DTYPES)
def test_every_pattern_decodes_as_in_torch(name: str) -> None:
    form, dtype = FORMATS[name], DTYPES[name]
    carrier = torch.uint8 if form.bits == 8 else torch.uint16
    patterns = torch.arange(2**form.bits).to(carrier)
    wanted = patterns.view(dtype).double()
    found = [form.decode(f"{i:0{form.bits}b}") for i in range(2**form.bits)]
    assert torch.equal(
        torch.tensor(found, dtype=torch.float64).nan_to_num(7e77), wanted.nan_to_num(7e77)
    )
    finite = [value for value in found if math.isfinite(value)]
    assert all(form.round(value) == value for value in finite)
    assert max(finite) == form.largest


@pytest.mark.parametrize("name", IN_TORCH)
def test_limits_are_those_of_torch(name: str) -> None:
    form, limits = FORMATS[name], torch.finfo(IN_TORCH[name])
    assert form.largest == limits.max
    assert form.smallest_normal == limits.tiny
    assert form.epsilon == limits.eps
    assert form.bits == limits.bits


@pytest.mark.parametrize("name", DTYPES)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_is_that_of_torch(name: str, value: float) -> None:
    form = FORMATS[name]
    if abs(value) > form.largest and not form.has_infinity:
        assert form.round(value) == math.copysign(form.largest, value)
        return
    assert form.round(value) == torch.tensor(value).to(DTYPES[name]).item()


@given(value=st.floats(width=32, allow_nan=False))
def test_fp32_bits_are_those_of_the_machine(value: float) -> None:
    bits = f"{struct.unpack('>I', struct.pack('>f', value))[0]:032b}"
    assert FORMATS["fp32"].encode(value) == bits


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_tf32_keeps_ten_bits(value: float) -> None:
    rounded = FORMATS["tf32"].round(value)
    if math.isfinite(rounded):
        assert FORMATS["fp32"].encode(rounded).endswith("0" * 13)
        assert abs(rounded - value) <= FORMATS["tf32"].spacing(value) / 2


def test_not_a_number_survives() -> None:
    assert all(math.isnan(form.round(math.nan)) for form in FORMATS.values())


def test_what_is_no_pattern_is_refused() -> None:
    for bits in ("01", "0" * 15 + "2"):
        with pytest.raises(ValueError, match="fp16 takes 16 digits"):
            FORMATS["fp16"].decode(bits)
    with pytest.raises(ValueError, match="too few"):
        NumberFormat("none", 1, 3)
