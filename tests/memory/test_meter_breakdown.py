"""What the meter says each byte is, against counts made without it."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torchvision
from meter_cases import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    MeteredProgram,
    Transformer,
    classify,
    infer,
    mlp,
    speak,
    state_tensors,
    tensor_bytes,
    total_bytes,
)
from torch import nn

from utils.memory import Category, Measurement, MemoryTimeline, measure


def metered(case: MeteredProgram) -> Measurement:
    """Measure a case without timing it."""
    return measure(case.step, model=case.model, optimizer=case.optimizer, timed_steps=0)


def end_of(timeline: MemoryTimeline, name: str) -> int:
    """The last moment of the last span of a name."""
    return [span.end_ns - 1 for span in timeline.spans if span.name == name][-1]


def images_case(optimizer: type[torch.optim.Optimizer], **how: object) -> MeteredProgram:
    model = torchvision.models.resnet18(num_classes=10)
    return classify(model, optimizer(model.parameters()), torch.ones(2, 3, 32, 32), **how)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_states_are_exact_when_the_optimizer_has_stepped(optimizer) -> None:
    case = images_case(optimizer)
    timeline = metered(case).timeline
    now = timeline.at(end_of(timeline, "optimizer step"))
    count = sum(p.numel() for p in case.model.parameters())
    tensors = len(list(case.model.parameters()))
    adam = optimizer is not torch.optim.SGD
    assert now[Category.PARAMETERS] == now[Category.GRADIENTS] == 4 * count
    assert now[Category.BUFFERS] == total_bytes(case.model.buffers())
    # Two moments for each element and a step counter of 4 bytes for each tensor.
    assert now[Category.OPTIMIZER_STATE] == (8 * count + 4 * tensors if adam else 0)
    assert now[Category.OPTIMIZER_STATE] == total_bytes(state_tensors(case.optimizer))
    assert now[Category.INPUTS] == 2 * 3 * 32 * 32 * 4


def test_resnet50_has_only_part_of_its_gradients_at_the_peak() -> None:
    model = torchvision.models.resnet50(num_classes=10)
    # A batch this large peaks in backward, while activations are still there.
    case = classify(model, torch.optim.SGD(model.parameters()), torch.ones(8, 3, 64, 64))
    timeline = metered(case).timeline
    weights = total_bytes(model.parameters())
    at_step = timeline.at(end_of(timeline, "backward"))
    assert at_step[Category.GRADIENTS] == at_step[Category.PARAMETERS] == weights
    peak = timeline.peak
    assert peak[Category.PARAMETERS] == weights
    assert peak[Category.BUFFERS] == total_bytes(model.buffers())
    assert timeline.peak_phase == "backward"
    assert 0 < peak[Category.GRADIENTS] < weights
    assert sum(timeline.peak.values()) == timeline.peak_bytes


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    model = Transformer()
    model.blocks[:2].requires_grad_(False)
    case = speak(model)
    timeline = metered(case).timeline
    now = timeline.at(end_of(timeline, "optimizer step"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert now[Category.PARAMETERS] == total_bytes(model.parameters())
    assert now[Category.GRADIENTS] == total_bytes(trained)
    assert now[Category.OPTIMIZER_STATE] == 2 * total_bytes(trained) + 4 * len(trained)


def test_tied_weights_count_once() -> None:
    timeline = metered(speak(model := Transformer(tied=True))).timeline
    now = timeline.at(end_of(timeline, "optimizer step"))
    once = total_bytes(Transformer().parameters()) - VOCABULARY * WIDTH * 4
    assert now[Category.PARAMETERS] == now[Category.GRADIENTS] == once
    assert once == total_bytes(model.parameters())


def test_gradients_kept_over_steps_are_gradients_from_the_start() -> None:
    case = images_case(torch.optim.SGD, set_to_none=False)
    timeline = metered(case).timeline
    assert timeline.at(timeline.start_ns)[Category.GRADIENTS] == total_bytes(
        case.model.parameters()
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch", [2, 4])
def test_cast_weights_are_copies_of_what_matrix_modules_hold(tied: bool, batch: int) -> None:
    """A batch of 2 makes the embedding's output as large as a cast of its table would be."""
    assert 2 * LENGTH * WIDTH * 4 == VOCABULARY * WIDTH * 2
    case = speak(Transformer(tied=tied), autocast=True, batch=batch)
    timeline = metered(case).timeline
    linears = [m for m in case.model.modules() if isinstance(m, nn.Linear)]
    held = chain.from_iterable(m.parameters(recurse=False) for m in linears)
    expected = sum(2 * p.numel() for p in held)
    assert timeline.at(end_of(timeline, "forward"))[Category.CAST_WEIGHTS] == expected
    assert timeline.at(end_of(timeline, "after step"))[Category.CAST_WEIGHTS] == 0
    cast = [a for a in timeline.allocations if a.category is Category.CAST_WEIGHTS]
    assert {a.module for a in cast}.isdisjoint({"", "embed", "norm"})


def test_cast_weights_of_attention_include_its_output_projection() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.ones(3, 10, 32)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()

    timeline = measure(step, model=model, timed_steps=0).timeline
    norms = sum(p.numel() for norm in (model.norm1, model.norm2) for p in norm.parameters())
    expected = 2 * (sum(p.numel() for p in model.parameters()) - norms)
    assert timeline.at(end_of(timeline, "forward"))[Category.CAST_WEIGHTS] == expected


def test_a_frozen_weight_is_cast_at_every_call() -> None:
    """Autocast keeps the copy of a weight only if the weight is trained."""
    frozen, trained = nn.Linear(16, 16), nn.Linear(16, 16)
    model = nn.Sequential(frozen.requires_grad_(False), trained, frozen, trained)
    x = torch.ones(4, 16, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).sum().backward()

    timeline = measure(step, model=model, timed_steps=0).timeline
    cast = [a for a in timeline.allocations if a.category is Category.CAST_WEIGHTS]
    assert sum(a.bytes for a in cast) == 2 * 3 * (16 * 16 + 16)


def test_gradients_that_the_step_replaces_are_gradients() -> None:
    """Such as a loop that scales them into new tensors, steps, and then drops them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.ones(8, 20)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()

    timeline = metered(MeteredProgram(model, optimizer, step, (x,))).timeline
    now = timeline.at(end_of(timeline, "optimizer step"))
    assert now[Category.GRADIENTS] == total_bytes(model.parameters())


def test_without_autocast_nothing_is_cast() -> None:
    timeline = metered(speak(Transformer())).timeline
    assert Category.CAST_WEIGHTS not in timeline.series()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_trades_activations_for_recomputed_ones(reentrant: bool) -> None:
    plain = metered(speak(Transformer())).timeline
    saved = metered(speak(Transformer(reentrant=reentrant))).timeline
    activations = [t.at(end_of(t, "forward"))[Category.ACTIVATIONS] for t in (plain, saved)]
    assert activations[1] < activations[0] / 3
    assert max(saved.series()[Category.RECOMPUTED]) > 0
    assert Category.RECOMPUTED not in plain.series()
    assert [span.name for span in saved.spans].count("recompute") == 3


def test_activations_of_a_layer_are_what_its_backward_saves() -> None:
    """Linear keeps its input, ReLU its output: at batch 8, the hidden activation once."""
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 10))
    case = classify(model, torch.optim.SGD(model.parameters()), torch.ones(8, 20))
    timeline = metered(case).timeline
    now = timeline.at(end_of(timeline, "forward"))
    assert now[Category.ACTIVATIONS] == 8 * 48 * 4
    assert now[Category.LOGITS_AND_LOSS] == 8 * 10 * 4
    assert now[Category.TEMPORARIES] == now[Category.OTHER] == 0


def test_accumulation_holds_the_activations_of_one_micro_batch() -> None:
    def most(micro_batches: int) -> int:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters())
        # Micro-batches of 8 each, however many there are.
        images = torch.ones(8 * micro_batches, 20)
        case = classify(model, optimizer, images, micro_batches=micro_batches)
        return int(max(metered(case).timeline.series()[Category.ACTIVATIONS]))

    assert most(1) == most(2) == most(5) > 0


def test_inference_has_no_gradients_and_keeps_no_activations() -> None:
    timeline = metered(infer(model := mlp(), x := torch.ones(16, 20))).timeline
    assert set(timeline.peak) <= {
        Category.PARAMETERS,
        Category.BUFFERS,
        Category.INPUTS,
        Category.TEMPORARIES,
        Category.LOGITS_AND_LOSS,
    }
    states = chain(model.parameters(), model.buffers(), [x])
    assert dict(timeline.at(timeline.start_ns)) == dict(timeline.at(timeline.end_ns))
    assert timeline.at(timeline.end_ns).total_bytes == total_bytes(states)


def test_inputs_made_in_the_step_are_inputs() -> None:
    model = nn.Linear(20, 10)

    def step() -> None:
        x = torch.ones(16, 20)
        model(x).sum().backward()

    timeline = measure(step, model=model, timed_steps=0).timeline
    assert timeline.peak[Category.INPUTS] == 16 * 20 * 4


def test_memory_of_another_device_is_not_counted() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model, x, mask = Masked(), torch.ones(4, 8), torch.empty(1000, device="meta")
    timeline = measure(lambda: model(x, mask), model=model, timed_steps=0).timeline
    assert timeline.at(timeline.start_ns)[Category.INPUTS] == tensor_bytes(x)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    optimizer, tokens = torch.optim.SGD(model.parameters()), torch.arange(10)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()

    timeline = measure(step, model=model, optimizer=optimizer, timed_steps=0).timeline
    now = timeline.at(end_of(timeline, "optimizer step"))
    dense = total_bytes(model[1].parameters())
    indices, values = 10 * 8, 10 * 4 * 4
    assert now[Category.GRADIENTS] == dense + indices + values


def test_the_loss_ends_where_its_backward_is_called() -> None:
    """Two tensors of logits' size exist then; the two more at the peak are backward's own."""
    vocabulary = 5000
    model, x = nn.Linear(8, vocabulary), torch.ones(64, 8)
    labels, logits = torch.zeros(64, dtype=torch.long), 64 * vocabulary * 4

    def step() -> None:
        predicted = model(x)
        nn.functional.cross_entropy(predicted, labels).backward()

    timeline = measure(step, model=model, timed_steps=0).timeline
    in_loss = timeline.at(end_of(timeline, "loss"))[Category.LOGITS_AND_LOSS]
    assert 2 * logits <= in_loss < 2.01 * logits, "the logits and their log-softmax"
    assert timeline.peak_phase == "backward", "the peak is backward's, not the loss's"
    assert timeline.peak[Category.LOGITS_AND_LOSS] < 2.01 * logits
    assert timeline.peak[Category.TEMPORARIES] >= logits


def test_a_backward_through_another_model_is_not_this_ones() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def step() -> None:
        model(torch.ones(1, 4))
        other(torch.ones(1, 4)).sum().backward()

    with pytest.raises(ValueError, match="never called backward"):
        measure(step, model=model, optimizer=torch.optim.SGD(model.parameters()), timed_steps=0)
