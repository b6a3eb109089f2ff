"""Runs the blocks of lesson 01's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, chdir
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from utils.lessons.blocks import run_block


def block_1(text: str) -> None:
    """Plain PyTorch: the account is the formula of the states, to the byte, and a tied weight once."""
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight  # tied, as in many language models
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(16 * 4, 16), nn.Tanh(), head)
    optimizer = torch.optim.Adam(model.parameters())
    tokens, labels = torch.randint(0, 50, (8, 4)), torch.randint(0, 50, (8,))

    def train_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()

    names = {"model": model, "optimizer": optimizer, "train_step": train_step}
    states = run_block(text, **names)["states"]
    _as_on_a_gpu(text, **names | {"train_step": lambda: None})  # a real one would look for the GPU
    parameters = list(model.parameters())
    four = 4 * sum(p.numel() for p in parameters)
    counters = 4 * len(parameters)  # Adam's, one a tensor
    expected = {"parameters": four, "gradients": four, "optimizer state": 2 * four + counters}
    assert states == expected, f"the account says {states}, the formula {expected}"


def _as_on_a_gpu(text: str, **names: Any) -> None:
    """The lines for a GPU, with CUDA's functions in name alone: what they record is written once."""
    with ExitStack() as stack:
        for name, answer in {"is_available": True, "max_memory_allocated": 2**30}.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        stack.enter_context(mock.patch.object(torch.cuda, "reset_peak_memory_stats"))
        memory = {
            name: stack.enter_context(mock.patch.object(torch.cuda.memory, name, autospec=True))
            for name in ("_record_memory_history", "_dump_snapshot")
        }
        run_block(text, **names)
    record, dump = memory["_record_memory_history"], memory["_dump_snapshot"]
    assert dump.call_count == 1, "the step's allocations are not written to a file"
    assert record.call_args == mock.call(enabled=None), "the recording goes on after the step"


def block_2(text: str) -> None:
    """transformers: the Trainer's metrics have the bytes that stayed and those that came and went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    model = Labelled()
    dataset = [{"inputs": torch.randn(8), "labels": torch.tensor(n % 2)} for n in range(16)]
    here = text.replace("max_steps=2", "max_steps=2, use_cpu=True")  # tests hide the GPU
    assert here != text, "the block says max_steps=2"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        metrics = run_block(here, model=model, dataset=dataset)["metrics"]
    missing = {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} - set(metrics)
    assert not missing, f"the Trainer gives {sorted(metrics)}, without {sorted(missing)}"


class Labelled(nn.Module):
    """A classifier as the Trainer wants one: it returns its loss when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(rows, 8) and (rows,) -> the mean loss and (rows, 2) logits."""
        logits = self.layer(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
