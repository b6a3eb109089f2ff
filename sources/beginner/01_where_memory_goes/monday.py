"""Runs the blocks of lesson 01's last cell on something small, and asserts what they promise."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import chdir, redirect_stdout, suppress
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

    def build(step: Any = train_step) -> tuple[Any, Any, Any]:
        return model, optimizer, step

    found = run_block(text, build=build)
    _as_on_a_gpu(text, lambda: build(lambda: None))  # a real step would look for the GPU
    parameters = list(model.parameters())
    four = 4 * sum(p.numel() for p in parameters)
    counters = 4 * len(parameters)  # Adam's, one a tensor
    expected = {"parameters": four, "gradients": four, "optimizer state": 2 * four + counters}
    states = found["states"]
    assert states == expected, f"the account says {states}, the formula {expected}"
    _counts_a_shard(found["held_bytes"])


def _as_on_a_gpu(text: str, build: Any) -> None:
    """The lines for a GPU: they record before the model is built, and tell what they know of a failure."""
    no_memory = torch.OutOfMemoryError("CUDA out of memory.")
    model, optimizer, _ = build()
    fails = mock.Mock(side_effect=[None, no_memory])  # in the second step
    for built, has_model in (
        (build, True),
        (no_memory, False),
        (lambda: (model, optimizer, fails), True),
    ):
        (begun, _, *rest), told = _calls_on_a_gpu(text, built)
        start = mock.call.record(max_entries=1_000_000, stacks="python")
        assert begun == start, "the recording begins after something was allocated"
        assert mock.call.dump("step.pickle") in rest, "the allocations are not written to a file"
        assert rest[-1] == mock.call.record(enabled=None), "the recording goes on after the step"
        assert "peak 1.00 GiB" in told and "reserved 2.00" in told, (
            f"it does not tell the peak: {told}"
        )
        assert ("'optimizer state': " in told) is has_model, f"it does not tell the states: {told}"
    assert fails.call_count == 2


def _calls_on_a_gpu(text: str, build: Any) -> tuple[list[Any], str]:
    """What the lines call and print, with CUDA's functions in name alone, up to an error."""
    seen, told = mock.Mock(), io.StringIO()
    seen.build.side_effect = build
    cuda = {
        "is_available": mock.Mock(return_value=True),
        "reset_peak_memory_stats": mock.Mock(),
        "max_memory_allocated": mock.Mock(return_value=2**30),
        "max_memory_reserved": mock.Mock(return_value=2**31),
    }
    recording = {"_record_memory_history": seen.record, "_dump_snapshot": seen.dump}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch.cuda.memory, **recording),
        redirect_stdout(told),
        suppress(torch.OutOfMemoryError),
    ):
        run_block(text, build=seen.build)
    return seen.mock_calls, told.getvalue()


class _Shard:
    """As a DTensor: the storage that it names is none, and `to_local` gives this rank's part."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(6)

    def untyped_storage(self) -> Any:
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")


def _counts_a_shard(held_bytes: Any) -> None:
    assert held_bytes([_Shard(), None]) == 24, "of a sharded tensor this rank's part counts"


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
