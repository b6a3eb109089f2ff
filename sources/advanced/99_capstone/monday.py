"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from utils.lessons.blocks import run_block, small_llama
from utils.memory import measure

LENGTH = 16


def block_1(text: str) -> None:
    """The states are those that the meter counts, and the utilization what the arithmetic says."""
    for frozen in (0, 1):  # all is trained; an adapter is trained on a frozen base
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        names = {"model": model, "tokens_per_second_per_card": 1e6, "peak_flops": 312e12}
        found = run_block(text, cards_that_share=1, **names)
        measured = measure(partial(_step, model, optimizer), model=model, optimizer=optimizer)
        held = measured.breakdown.state_bytes
        assert abs(found["states_gb"] * 1e9 / held - 1) < 1e-3, "the meter counts other states"
        flops = (6 * (2 - frozen) + 4 * frozen) * 1024**2
        assert abs(found["mfu"] - flops * 1e6 / 312e12) < 1e-9, "6 FLOP a trained parameter, or 4"
        shared = run_block(text, cards_that_share=8, **names)["states_gb"]
        assert abs(shared * 8 - found["states_gb"]) < 1e-12, "eight cards that share hold one part"


def block_2(text: str) -> None:
    """Trainer counts the tokens of the second and third step, and the clock stands between them."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        rows = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}] * 6
        trainer: Any = Trainer(small_llama(), args, train_dataset=rows)  # a list is a dataset, too
        names = {"args": args, "trainer": trainer, "TrainerCallback": TrainerCallback, "time": time}
        found = run_block(text, **names)
    assert trainer.state.num_input_tokens_seen == 3 * 2 * LENGTH, "three batches of two texts"
    assert found["tokens_after"] - found["tokens_before"] == 2 * LENGTH, "the third step alone"
    rate, seconds = found["tokens_per_second_per_card"], found["ended"] - found["began"]
    assert abs(rate * seconds - 2 * LENGTH) < 1e-6, "tokens over seconds, on one card"


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
