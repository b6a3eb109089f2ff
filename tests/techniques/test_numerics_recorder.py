"""The recorder of a mixed-precision run: what it records, what it blames, and that it changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.techniques import NonFinite, NumericsRecorder, StepRecord
from utils.techniques.numerics_recorder import MOST_ROWS

FP16 = torch.float16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches(
    steps: int, spoil: tuple[int, int] | None = None, value: float = math.nan
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, 32, 16, generator=generator)
    labels = (x @ torch.randn(16, 4, generator=generator)).argmax(-1)
    if spoil:
        x[spoil[0], spoil[1], 3] = value
    return list(zip(x, labels, strict=True))


def train(
    dtype: torch.dtype | None = FP16,
    scale: float = 0.0,
    interval: int = 5,
    weight: float = 1.0,
    clip: tuple[float, bool] | None = None,
    steps: int = 25,
    spoil: tuple[int, int] | None = None,
    value: float = math.nan,
    model: nn.Module | None = None,
    recorded: bool = True,
) -> tuple[list[StepRecord], list[float], nn.Module]:
    """Records, losses and the model; `scale` 0 is a disabled scaler, `clip` is norm and unscale_."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / weight, momentum=0.9)
    options = {"init_scale": scale or 1.0, "growth_interval": interval, "enabled": scale > 0}
    scaler = torch.amp.GradScaler("cpu", **options)
    recorder = NumericsRecorder(model, optimizer, scaler)
    losses = []
    if not recorded:
        recorder.close()
    for x, labels in batches(steps, spoil, value):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or FP16, enabled=dtype is not None):
            loss = weight * F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        if clip:
            if clip[1]:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip[0])
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() / weight)
        if recorded:
            recorder.record(loss / weight)
    recorder.close()
    return recorder.records, losses, model


def test_a_recorded_run_computes_what_it_did() -> None:
    records, losses, model = train(scale=2.0**30)
    _, plain_losses, plain = train(scale=2.0**30, recorded=False)
    assert losses == plain_losses
    assert [r.loss for r in records] == pytest.approx(losses)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_large_scale_skips_steps_and_settles() -> None:
    records, _, _ = train(scale=2.0**30, interval=1000)
    skipped = [r.skipped for r in records]
    settled = skipped.index(False)
    assert settled >= 8, "the planted scale is far too large"
    assert skipped == [True] * settled + [False] * (len(records) - settled)
    assert [r.scale for r in records[: settled + 1]] == [
        2.0 ** (30 - i) for i in range(settled + 1)
    ]
    assert {r.scale for r in records[settled:]} == {2.0 ** (30 - settled)}
    assert all(r.step_norm is None for r in records[:settled])
    assert all("gradient" in r.first.kind for r in records[:settled])
    assert all(r.first is None for r in records[settled:])
    assert max(s.overflowed for s in records[0].layers.values()) > 0


def test_a_small_loss_stalls_without_a_scaler_and_trains_with_one() -> None:
    stalled, _, model = train(weight=1e-7)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True)
    )
    assert all(r.grad_norm == 0 and r.scale is None and not r.skipped for r in stalled)
    assert all(shares.zero == 1 for r in stalled for shares in r.layers.values())
    rescued, _, _ = train(weight=1e-7, scale=2.0**16, interval=2)
    fp32, _, _ = train(dtype=None)
    assert rescued[-1].loss == pytest.approx(fp32[-1].loss, rel=0.05)
    assert rescued[-1].loss < 0.6 * rescued[0].loss
    assert max(shares.zero for shares in rescued[-1].layers.values()) < 0.1
    bf16, _, _ = train(dtype=torch.bfloat16, weight=1e-7)
    assert bf16[-1].loss == pytest.approx(fp32[-1].loss, rel=0.05), "bf16 has the range"


def test_norms_are_unscaled_and_tell_who_clipped_what() -> None:
    plain, _, _ = train(dtype=None, steps=3)
    for right in (True, False):
        records, _, _ = train(scale=2.0**10, clip=(0.1, right), steps=3)
        assert records[0].grad_norm == pytest.approx(plain[0].grad_norm, rel=0.01)
        wanted = 0.1 if right else 0.1 / 2**10
        assert all(r.step_norm == pytest.approx(wanted, rel=1e-4) for r in records)


def test_shares_are_what_the_low_precision_makes_of_a_gradient() -> None:
    layer = nn.Linear(6, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with NumericsRecorder(layer, optimizer) as recorder:
        loss = layer(torch.tensor([[0.0, 1e-9, 1e-6, 1e-5, 1.0, 1e5]])).sum()
        loss.backward()
        optimizer.step()
        shares = recorder.record(loss).layers[""]
    assert [shares.zero, shares.subnormal, shares.overflowed] == pytest.approx(
        [2 / 6, 2 / 6, 1 / 6]
    )


class Breaks(nn.Module):
    """Passes its input on, and breaks as told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "output":
            return torch.where(torch.arange(len(x))[:, None] == 7, math.inf, x)
        if self.how == "gradient":
            return x + 0 * (x - x.detach()).abs().sqrt()  # finite, with an infinite slope
        return x


def blamed(how: str, place: int = 2) -> Any:
    layers = [nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Linear(16, 4)]
    layers.insert(place, Breaks(how))
    return train(dtype=None, steps=1, model=nn.Sequential(*layers))[0][0].first


def test_the_module_that_breaks_is_blamed() -> None:
    assert (blamed("output").kind, blamed("output").module, blamed("output").rows) == (
        "output",
        "2",
        (7,),
    )
    assert (blamed("gradient").kind, blamed("gradient").module) == ("gradient", "2")
    assert str(blamed("output")) == "output of 2, rows [7]"
    assert blamed("nothing") is None
    many = NonFinite("output", "2", tuple(range(MOST_ROWS)))
    assert str(many) == "output of 2, rows [0, 1, 2, ...]", "more than were kept"


def test_bad_data_are_found_by_step_and_row() -> None:
    for dtype, scale in ((FP16, 2.0**10), (None, 0.0)):
        records, _, _ = train(dtype=dtype, scale=scale, spoil=(6, 21), steps=9)
        found = [r for r in records if r.first]
        assert (found[0].step, found[0].first.kind, found[0].first.rows) == (6, "input", (21,))
        assert math.isfinite(records[-1].loss) == (scale > 0), "a scaler hides it"


@pytest.mark.parametrize("scale", [0.0, 2.0**10])
def test_a_finite_outlier_is_bad_data_and_no_fault_of_the_first_layer(scale: float) -> None:
    records, _, _ = train(scale=scale, spoil=(6, 21), value=1e30, steps=8)
    found = next(r for r in records if r.first)
    assert (found.step, found.first.kind, found.first.rows) == (6, "input", (21,))
    assert str(found.first) == "input of the model, rows [21]: finite, but 1e+30"


def test_large_inputs_of_all_rows_are_no_outlier() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NumericsRecorder(model, optimizer) as recorder:
        with torch.autocast("cpu", dtype=FP16):
            loss = model(torch.full((4, 16), 1e6)).float().sum()
        loss.backward()
        assert recorder.record(loss).first.kind == "output"
        optimizer.zero_grad()
        spread = torch.ones(4, 16)
        spread[2] *= 900  # large, and not a thousand times the others
        model(spread).sum().backward()
        assert recorder.record(torch.zeros(())).first is None


def test_a_loss_that_is_not_finite_is_blamed_before_its_gradients() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NumericsRecorder(model, optimizer) as recorder:
        loss = (model(torch.ones(2, 16)).sum() - 1e9).exp().log()
        loss.backward()
        assert str(recorder.record(loss).first) == "loss"


def test_hooks_go_when_it_is_closed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NumericsRecorder(model, optimizer):
        pass
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    assert not optimizer._optimizer_step_pre_hooks


def test_misuse_is_refused_in_words() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = NumericsRecorder(model, optimizer)
    with pytest.raises(ValueError, match="call record after loss.backward"):
        recorder.record(torch.zeros(()))
    with pytest.raises(ValueError, match="nothing to record"):
        NumericsRecorder(network().requires_grad_(False), optimizer)
    with pytest.raises(ValueError, match=r"take torch\.float16"):
        NumericsRecorder(model, optimizer, low=torch.float64)
