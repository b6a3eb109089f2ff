"""`setup()` on machines that are not at hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils import start
from utils.units import GIB

CARDS = {
    "Tesla T4": (7, 5, 14.7),
    "Tesla P100-PCIE-16GB": (6, 0, 15.9),
    "Tesla V100-SXM2-32GB": (7, 0, 31.7),
    "NVIDIA A100-SXM4-80GB": (8, 0, 79.2),
}


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU and no override, whatever the machine that runs the tests has."""
    monkeypatch.delenv("COURSE_SCALE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def with_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report one of CARDS."""
    major, minor, gib = CARDS[name]
    card = SimpleNamespace(major=major, minor=minor, total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("name", "dtype", "reason", "scale"),
    [
        ("Tesla T4", torch.float16, "7.5 has no bfloat16 units", "small"),
        ("Tesla P100-PCIE-16GB", torch.float16, "6.0 has no bfloat16 units", "small"),
        ("Tesla V100-SXM2-32GB", torch.float16, "7.0 has no bfloat16 units", "full"),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, "8.0 computes it", "full"),
    ],
)
def test_cards(
    name: str,
    dtype: torch.dtype,
    reason: str,
    scale: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_card(name, monkeypatch)
    here = start.setup("beginner/01")
    assert (here.device, here.dtype, here.scale) == (torch.device("cuda", 0), dtype, scale)
    assert here.meter_device == here.device
    printed = capsys.readouterr().out
    assert name in printed
    assert reason in printed


def test_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    here = start.setup("beginner/01")
    assert (here.device.type, here.dtype, here.scale) == ("cpu", torch.bfloat16, "tiny")
    assert here.memory_bytes > 0
    assert (here.root / "utils/units.py").is_file()
    printed = capsys.readouterr().out
    for word in ("same range as float32", "meter", "manual_seed(0)", torch.__version__):
        assert word in printed


@pytest.mark.parametrize(("macos_14", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_mps_is_for_speed(
    macos_14: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: macos_14)
    monkeypatch.setattr(torch, "manual_seed", lambda _: None)
    here = start.setup("00")
    assert (here.device.type, here.dtype, here.scale) == ("mps", dtype, "tiny")
    assert here.meter_device == torch.device("cpu")
    assert "memory is measured on the CPU" in capsys.readouterr().out


def test_the_seed_is_set() -> None:
    start.setup("beginner/01")
    first = torch.rand(3)
    start.setup("beginner/01")
    assert torch.equal(torch.rand(3), first)


def test_scale_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SCALE", "full")
    assert start.setup("labs/beginner/01").scale == "full"
    monkeypatch.setenv("COURSE_SCALE", "huge")
    with pytest.raises(ValueError, match=r"COURSE_SCALE is 'huge'\. Set it to one of tiny, small"):
        start.setup("labs/beginner/01")


@pytest.mark.parametrize("lesson", ["", "1", "beginner", "beginner/1", "expert/01", 1, None])
def test_a_name_that_is_no_lesson(lesson: object) -> None:
    with pytest.raises(ValueError, match=r"names no lesson\. Write tier and number"):
        start.setup(lesson)


def test_a_container_has_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(start, "_CGROUP_LIMIT", limit)
    machine = start.memory_of(torch.device("cpu"))
    limit.write_text("1048576\n")
    assert start.memory_of(torch.device("cpu")) == 1048576
    limit.write_text("max\n")
    assert start.memory_of(torch.device("cpu")) == machine


def test_windows_is_told_about_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start.platform, "system", lambda: "Windows")
    start.setup("00")
    assert "WSL2" in capsys.readouterr().out
