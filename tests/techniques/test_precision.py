"""Mixed precision: the choice of a type, the training step, TF32's settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.techniques import MixedStep, choose_autocast_dtype, has_native_dtype, tf32


def with_card(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a card of this compute capability."""
    card = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    has_bf16 = capability >= (8, 0)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or has_bf16,
    )


def classifier() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randn(16, 24), torch.randint(0, 10, (16,))


def losses(steps: int, dtype: torch.dtype) -> list[float]:
    model, optimizer, inputs, labels = classifier()
    step = MixedStep(model, optimizer, dtype=dtype)
    return [step(inputs, labels).item() for _ in range(steps)]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)],
)
def test_the_choice_on_a_gpu(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_card(capability, monkeypatch)
    dtype, reason = choose_autocast_dtype("cuda")
    assert dtype is expected
    assert f"{capability[0]}.{capability[1]}" in reason
    assert has_native_dtype("cuda", torch.float16)
    assert has_native_dtype("cuda", torch.bfloat16) is (capability >= (8, 0))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=["V100", "T4"])
def test_bf16_on_a_card_that_would_emulate_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_card(capability, monkeypatch)
    with pytest.raises(ValueError, match=r"no bfloat16 units.*Take torch\.float16"):
        choose_autocast_dtype("cuda", torch.bfloat16)


def test_bf16_on_a_card_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card((8, 0), monkeypatch)
    assert choose_autocast_dtype("cuda", torch.bfloat16)[0] is torch.bfloat16
    assert choose_autocast_dtype("cuda", torch.float16) == (
        torch.float16,
        "asked for; its range is small, so it needs loss scaling",
    )


def test_a_type_without_16_bits() -> None:
    with pytest.raises(ValueError, match=r"Write torch\.float16 or torch\.bfloat16"):
        choose_autocast_dtype("cpu", torch.float64)
    with pytest.raises(ValueError, match="no type for mixed precision"):
        MixedStep(*classifier()[:2], dtype=torch.float64)


def test_float32_is_the_plain_step() -> None:
    model, optimizer, inputs, labels = classifier()
    plain = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert losses(5, torch.float32) == plain


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.002), (torch.bfloat16, 0.02)])
def test_losses_follow_fp32(dtype: torch.dtype, tolerance: float) -> None:
    plain, mixed = losses(20, torch.float32), losses(20, dtype)
    assert mixed == pytest.approx(plain, rel=tolerance)
    assert mixed != plain, "nothing was computed in 16 bits"
    assert plain[-1] < plain[0]


def test_states_stay_in_fp32() -> None:
    model, optimizer, inputs, labels = classifier()
    step = MixedStep(model, optimizer, dtype=torch.float16)
    loss = step(inputs, labels)
    assert loss.dtype is torch.float32 and not loss.requires_grad
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in tensors} == {torch.float32}


def test_fp16_scales_and_bf16_does_not() -> None:
    assert MixedStep(*classifier()[:2], dtype=torch.float16).scaler.is_enabled()
    assert not MixedStep(*classifier()[:2], dtype=torch.bfloat16).scaler.is_enabled()
    assert not MixedStep(*classifier()[:2], dtype=torch.float32).scaler.is_enabled()
    assert MixedStep(*classifier()[:2]).dtype is choose_autocast_dtype("cpu")[0]


def test_an_overflowing_step_is_skipped_and_the_scale_lowered() -> None:
    model, optimizer, inputs, labels = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    step = MixedStep(model, optimizer, dtype=torch.float16, scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    step(inputs, labels)
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_scaler_is_needless_with_bf16() -> None:
    model, optimizer, inputs, labels = classifier()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(UserWarning, match="needless with torch.bfloat16"):
        step = MixedStep(model, optimizer, dtype=torch.bfloat16, scaler=scaler)
    assert not step.scaler.is_enabled()
    assert [step(inputs, labels).item() for _ in range(3)] == losses(3, torch.bfloat16)


def test_a_model_that_was_cast_as_a_whole() -> None:
    model, optimizer, *_ = classifier()
    with pytest.raises(ValueError, match=r"Leave out model\.half\(\)"):
        MixedStep(model.half(), optimizer)
    with pytest.raises(ValueError, match="no parameters"):
        MixedStep(nn.ReLU(), optimizer)


@pytest.mark.parametrize("enabled", [True, False])
def test_tf32_is_set_and_set_back(enabled: bool) -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    with pytest.raises(KeyError), tf32(enabled):
        assert {s.fp32_precision for s in switches} == {"tf32" if enabled else "ieee"}
        raise KeyError
    assert [switch.fp32_precision for switch in switches] == before


@pytest.mark.parametrize(
    ("machine", "has_onednn", "instructions", "expected"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 of before 2020: oneDNN's own answer is yes
        ("aarch64", True, False, True),
        ("arm64", False, False, False),  # macOS: PyTorch has no oneDNN to ask
    ],
)
def test_what_a_cpu_computes(
    machine: str,
    has_onednn: bool,
    instructions: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onednn = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True) if has_onednn else None
    monkeypatch.setattr(torch, "ops", SimpleNamespace(mkldnn=onednn))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert has_native_dtype("cpu", torch.bfloat16) is expected
    assert not has_native_dtype("cpu", torch.float16)


def test_this_cpu_is_asked() -> None:
    assert has_native_dtype("cpu", torch.bfloat16) in (True, False)
