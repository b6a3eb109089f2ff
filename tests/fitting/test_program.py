"""Each part of the program trains as plain PyTorch does: the same losses, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from utils.fitting import training_program

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
STEPS, ROWS, LENGTH, RATE = 3, 4, 32, 1e-2
WITHIN = 1e-5  # fp32 sums in another order; a wrong part is off by 1e-3 and more


def model_of(tiny: Path) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).train()


def texts() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(32, 127, (ROWS, LENGTH)) for _ in range(STEPS)]


def plain_losses(tiny: Path, kind: Any = torch.optim.AdamW) -> list[float]:
    """A loop that uses nothing of the course."""
    model, losses = model_of(tiny), []
    optimizer = kind(model.parameters(), lr=RATE)
    for tokens in texts():
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(
    tiny: Path,
    change: Callable[[Any], Any] = lambda model: None,
    optimizer: str = "adamw",
    pieces: int = 1,
    context: Any = contextlib.nullcontext,
) -> list[float]:
    model = model_of(tiny)
    change(model)
    optimize = optimizer and training_program.make_optimizer(optimizer, model.parameters(), RATE)
    return [
        float(
            training_program.train_step(
                model,
                optimize or None,
                [{"input_ids": part, "labels": part} for part in tokens.chunk(pieces)],
                context,
            )
        )
        for tokens in texts()
    ]


PARTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "PyTorch's own AdamW": {"optimizer": "adamw-foreach"},
    "two micro-batches": {"pieces": 2},
    "all blocks checkpointed": {"change": lambda model: training_program.checkpoint_each(model, 1)},
    "each second block checkpointed": {
        "change": lambda model: training_program.checkpoint_each(model, 2)
    },
    "chunked loss": {"change": training_program.chunk_loss},
    "activations on the host": {"context": training_program.on_the_host},
    "step in backward": {
        "change": lambda model: training_program.step_in_backward(model, "adamw", RATE),
        "optimizer": "",
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_trains_as_plain_pytorch(name: str, tiny: Path) -> None:
    assert losses_of(tiny, **PARTS[name]) == pytest.approx(plain_losses(tiny), rel=WITHIN)


@pytest.mark.parametrize(("every", "spared", "first"), [(2, 0, "YNYNYN"), (1, 3, "YYNYYN")])
def test_those_blocks_alone_are_checkpointed(
    every: int, spared: int, first: str, tiny: Path
) -> None:
    model = model_of(tiny)
    training_program.checkpoint_each(model, every, spared)
    flags = ["NY"[layer.gradient_checkpointing] for layer in model.model.layers]
    assert "".join(flags[:6]) == first


def test_a_step_in_backward_leaves_no_gradient(tiny: Path) -> None:
    model = model_of(tiny)
    training_program.step_in_backward(model, "sgd", RATE)
    before = model.lm_head.weight.detach().clone()
    tokens = texts()[0]
    training_program.train_step(model, None, [{"input_ids": tokens, "labels": tokens}])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(before, model.lm_head.weight)


def test_adapters_alone_are_trained_and_begin_where_the_model_stands(tiny: Path) -> None:
    model = model_of(tiny)
    adapted = training_program.add_adapters(model, 4, ["q_proj", "v_proj"])
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    tokens = texts()[0]
    first = adapted(input_ids=tokens, labels=tokens).loss.item()
    assert first == pytest.approx(plain_losses(tiny)[0], rel=WITHIN)


def test_outputs_under_autocast_are_fp32(tiny: Path) -> None:
    model, tokens = model_of(tiny), texts()[0]
    training_program.autocast_forward(model, "cpu", torch.bfloat16)
    out = model(input_ids=tokens, labels=tokens)
    assert out.logits.dtype is torch.float32
    assert out.loss.item() == pytest.approx(plain_losses(tiny)[0], rel=1e-2)
