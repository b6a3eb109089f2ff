"""LSTM, GRU and RNN on a simulated GPU: cuDNN's reserve space, by what is published of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from utils.memory import Category, Measurement
from utils.memory.source import counts_calls
from utils.simulation import SimulationError, simulate
from utils.simulation.recurrences import GRU, LSTM, VALUES, reserve_bytes

A100 = "A100 80GB"
STEPS, BATCH, WIDTH, HIDDEN = 64, 24, 320, 512
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM of three layers": (nn.LSTM, {"num_layers": 3}),
    "LSTM, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "GRU, batch first": (nn.GRU, {"num_layers": 2, "batch_first": True}),
    "LSTM without biases": (nn.LSTM, {"bias": False}),
    "LSTM, projected": (nn.LSTM, {"num_layers": 2, "proj_size": 128}),
}


def inputs(model: Any, **how: Any) -> torch.Tensor:
    shape = (BATCH, STEPS, WIDTH) if model.batch_first else (STEPS, BATCH, WIDTH)
    return torch.randn(shape, **how)


def trained(model: Any, _: Any = None) -> None:
    model(inputs(model, device="cuda", requires_grad=True))[0].sum().backward()
    model.zero_grad()


def built(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    make, how = KINDS[kind]
    return lambda: make(WIDTH, HIDDEN, **how).to("cuda", dtype)


def kept_bytes(found: Measurement) -> list[int]:
    """Sizes of what is born in forward and lives until backward."""
    return [a.bytes for a in found.timeline.allocations if a.category is Category.ACTIVATIONS]


def predicted(kind: str, itemsize: int = 4) -> int:
    make, how = KINDS[kind]
    values, layers = VALUES[LSTM if make is nn.LSTM else GRU], how.get("num_layers", 1)
    values = 1 if make is nn.RNN else values
    directions, output = 1 + how.get("bidirectional", False), how.get("proj_size", HIDDEN)
    a_step = values * layers * directions * HIDDEN + (layers - 1) * directions * output
    return STEPS * BATCH * a_step * itemsize


def test_the_published_sizes() -> None:
    """torchbench's tts_angular, and PyTorch's issue 2895, whose sizes are of whole rows."""
    one_layer = reserve_bytes(LSTM, 1, 1, 50 * 64, 768, 768, 2)
    assert one_layer == pytest.approx(24_576_016, abs=16)
    for mode, size in ((LSTM, 736_000_000), (GRU, 864_000_000)):
        a_row = reserve_bytes(mode, 4, 1, 1, 320, 320, 4)
        assert size / a_row == 25_000, "steps times sequences, the same for both"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reserve_space_is_kept_until_backward(kind: str, dtype: torch.dtype) -> None:
    def step(model: Any, _: Any) -> None:
        model(inputs(model, device="cuda", dtype=dtype, requires_grad=True))[0].sum().backward()

    found = simulate(built(kind, dtype), step, device=A100)
    assert kept_bytes(found).count(predicted(kind, dtype.itemsize)) == 1
    assert max(kept_bytes(found)) == predicted(kind, dtype.itemsize)
    assert any("predicted from published sizes" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_look_as_for_real(kind: str) -> None:
    looks: list[Any] = []

    def step(model: Any, _: Any = None) -> None:
        x = inputs(model, requires_grad=True)
        out, states = model(x)
        out.sum().backward()
        states = states if isinstance(states, tuple) else (states,)
        grads = [p.grad for p in model.parameters()]
        looks.append([t.shape for t in (out, *states, x.grad, *grads)])

    make, how = KINDS[kind]
    simulate(lambda: make(WIDTH, HIDDEN, **how), step, device=A100)
    step(make(WIDTH, HIDDEN, **how))
    assert looks[0] == looks[-1]


def test_a_simulated_gpu_takes_no_kernels_of_the_cpu() -> None:
    """Step by step each gate of each step is a tensor of its own, and there are no such left."""
    timeline = simulate(built("LSTM"), trained, device=A100).timeline
    assert len([a for a in timeline.allocations if a.bytes]) < STEPS


def test_autocast_keeps_one_copy_of_all_weights_in_16_bits() -> None:
    def step(model: Any, _: Any) -> None:
        with torch.autocast("cuda"):
            out = model(inputs(model, device="cuda"))[0]
            assert out.dtype is torch.float16
        out.float().sum().backward()
        assert model.weight_hh_l0.grad.dtype is torch.float32
        model.zero_grad()

    found = simulate(built("LSTM"), step, device=A100)
    alive = [a.bytes for a in found.timeline.allocations]
    weights = [2 * 4 * HIDDEN * width for width in (WIDTH, HIDDEN)]
    assert [alive.count(size) for size in weights] == [1, 1]
    assert alive.count(2 * 4 * HIDDEN * (WIDTH + HIDDEN + 2)) == 1, "the gradients' buffer alone"
    assert max(kept_bytes(found)) == predicted("LSTM", 2)


def test_weights_that_are_computed_are_copied_to_one_buffer() -> None:
    """Parameters lie in one buffer since `flatten_parameters`; what is computed does not."""

    def step(scale: float | None) -> Any:
        def run(model: Any, _: Any) -> None:
            flat = model._flat_weights
            weights = flat if scale is None else [weight * scale for weight in flat]
            state = torch.zeros(1, BATCH, HIDDEN)
            out = torch.lstm(
                inputs(model), (state, state), weights, True, 1, 0.0, True, False, False
            )
            out[0].sum().backward()
            model.zero_grad()

        return run

    def build() -> Any:
        return nn.LSTM(WIDTH, HIDDEN)

    size = sum(p.numel() * 4 for p in build().parameters())
    timelines = [simulate(build, step(scale), device=A100).timeline for scale in (None, 2.0)]
    buffers = [[a.bytes for a in found.allocations].count(size) for found in timelines]
    assert buffers == [1, 2], "one for the gradients, and one for the copies"


def test_evaluation_reserves_nothing_and_cannot_go_backward() -> None:
    def infers(model: Any, _: Any) -> None:
        with torch.no_grad():
            model.eval()(inputs(model, device="cuda"))

    found = simulate(built("LSTM"), infers, device=A100)
    assert max(a.bytes for a in found.timeline.allocations) < predicted("LSTM")
    with pytest.raises(RuntimeError, match="only be called in training mode"):
        simulate(built("LSTM"), lambda model, _: trained(model.eval()), device=A100)


@pytest.mark.parametrize("kind", ["LSTM", "GRU, batch first"])
def test_packed_sequences_reserve_for_the_longest(kind: str) -> None:
    """cuDNN's reference: the sizes follow from the longest sequence and the batch."""
    looks: list[Any] = []

    def step(model: Any, _: Any = None) -> None:
        lengths, first = torch.linspace(STEPS, 1, BATCH).long(), model.batch_first
        x = inputs(model, device=next(model.parameters()).device, requires_grad=True)
        out = model(pack_padded_sequence(x, lengths, batch_first=first))[0]
        padded, back = pad_packed_sequence(out, batch_first=first, total_length=STEPS + 2)
        assert back.tolist() == lengths.tolist(), "the lengths came back as others"
        padded.sum().backward()
        looks.append([t.shape for t in (out.data, padded, x.grad)])
        model.zero_grad()

    kept = kept_bytes(simulate(built(kind), step, device=A100))
    make, how = KINDS[kind]
    step(make(WIDTH, HIDDEN, **how))
    assert kept.count(predicted(kind)) == 1
    assert looks[0] == looks[-1], "other shapes than for real"


def test_packed_sequences_of_unknown_lengths_name_their_line() -> None:
    def step(model: Any, _: Any) -> None:
        lengths = torch.randint(1, STEPS, (BATCH,))
        model(pack_padded_sequence(inputs(model), lengths, enforce_sorted=False))

    with pytest.raises(SimulationError, match=r"test_recurrences.py, line \d+"):
        simulate(built("LSTM"), step, device=A100)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_elsewhere_they_are_said_to_be_simulated_step_by_step(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, how = KINDS[kind]
    on_cpu = simulate(lambda: make(WIDTH, HIDDEN, **how), trained_on_cpu, device="cpu")
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    without = simulate(built(kind), trained, device=A100)
    is_asked = kind == "LSTM" and counts_calls()  # oneDNN's layers tell what they take
    assert any("are simulated step by step" in note for note in on_cpu.notes) is not is_asked
    assert any("are simulated step by step" in note for note in without.notes)


def trained_on_cpu(model: Any, _: Any) -> None:
    model(inputs(model))[0].sum().backward()


def test_dropout_between_layers_and_a_second_backward() -> None:
    """`retain_graph` keeps a copy of the reserve space, which backward writes to."""

    def step(model: Any, _: Any) -> None:
        out = model(inputs(model, device="cuda"))[0].sum()
        out.backward(retain_graph=True)
        out.backward()

    def build() -> Any:
        return nn.LSTM(WIDTH, HIDDEN, 2, dropout=0.1).to("cuda")

    found = simulate(build, step, device=A100)
    reserve = predicted("LSTM of three layers") // 17 * 11  # 5 x 3 + 2 values of 5 x 2 + 1
    assert found.peak_bytes > 2 * reserve
