"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from utils.lessons.blocks import run_block

ASKED_AT, STEPS = 3, 10
TRAINER = """
import os, signal, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Ends(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, flush=True)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

args = TrainingArguments(sys.argv[1], max_steps=20, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True)
BLOCK
sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, vocab_size=64)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows, callbacks=[Ends()]).train(resume_from_checkpoint=last)
"""


def block_1(text: str) -> None:
    """The step in which the signal came is saved, once, and the loop ends with 75."""
    saved: list[int] = []

    def train_step(step: int) -> None:
        if step == ASKED_AT:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        run_block(
            text,
            first_step=1,
            steps=STEPS,
            every=2,
            train_step=train_step,
            any_rank=bool,
            save=saved.append,
        )
    except SystemExit as end:
        assert end.code == 75, "75 says: saved, call me again"
    else:
        raise AssertionError("the loop went on after the signal")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == [1, ASKED_AT], "every second step, and the one after which it ends"


def block_2(text: str) -> None:
    """A Trainer that gets SIGTERM in its second step saves and stops; called again, it goes on from there."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "train.py"), Path(folder, "out")
        script.write_text(TRAINER.replace("BLOCK", text))
        out.mkdir()
        first = _steps(script, out)
        saved = [path.name for path in out.glob("checkpoint-*")]
        second = _steps(script, out)
    assert 2 <= len(first) < 20, f"it stops before its last step: {first}"
    assert len(saved) == 1, f"it saves once: {saved}"
    at = int(saved[0].removeprefix("checkpoint-"))
    # Before the optimizer's step it looks, too: then it saves the step before, and ends with the one begun.
    assert len(first) - at in (0, 1), f"it saves where it ends: {saved} after {first}"
    assert second == list(range(at + 1, 21)), f"it goes on from there, and not {second}"


def _steps(script: Path, out: Path) -> list[int]:
    """Run the script; the steps that it did."""
    done = subprocess.run(
        [sys.executable, script, out], cwd=out.parent, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
