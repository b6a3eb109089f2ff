"""Runs the blocks of the lesson's last cell, and asserts what that cell promises of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from utils.lessons.blocks import run_block

from .stubs import try_script

FIRST, ASKED_AT, STEPS = 1, 3, 10
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

args = TrainingArguments(sys.argv[1], max_steps=20, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
                         enable_jit_checkpoint=True)
sizes = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, vocab_size=64)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows, callbacks=[Ends()])
BLOCK
"""


def block_1(text: str) -> None:
    """A task that ends with 75 is called again; one that fails three times after the same save, one that is done never."""
    saved = try_script(text, codes=dict.fromkeys(range(4), 75), starts=5)
    assert saved.requeued == 5 * ["4711"], "75 says: saved, call me again, however often"
    assert {rank[:3] for rank in saved.ranks} == {(str(rank), "4", "n1") for rank in range(4)}
    for children in (True, False):
        warned = try_script(text, signal_to="tasks", children=children)
        assert warned.ended == [75] * 4 and warned.requeued == ["4711"], "python hears the signal"
    assert try_script(text).requeued == [], "it is done"
    failing: dict[str, Any] = {"codes": {2: 1}, "starts": 9}
    assert try_script(text, **failing).requeued == 3 * ["4711"], "no more after the same save"
    saving = 'mkdir -p "$saves/step-$SLURM_RESTART_COUNT"\nsrun '
    assert try_script(text.replace("srun ", saving, 1), **failing).requeued == 9 * ["4711"], (
        "each start saved anew"
    )
    assert saved.patience_seconds == 60, "a rank that saved first must not end the others"


def block_2(text: str) -> None:
    """The step in which the signal came is saved, once, under the number to go on from, and it ends with 75."""
    saved, done = list[int](), list[int]()

    def train_step(step: int) -> None:
        done.append(step)
        if step == ASKED_AT:
            os.kill(os.getpid(), signal.SIGUSR1)

    met: list[str] = []
    names: dict[str, Any] = {"steps": STEPS, "every": 2, "train_step": train_step, "any_rank": bool}
    names |= {"save": saved.append, "barrier": lambda: met.append("here")}
    before = signal.getsignal(signal.SIGUSR1)
    try:
        run_block(text, first_step=FIRST, **names)
    except SystemExit as end:
        assert end.code == 75, "75 says: saved, call me again"
    else:
        raise AssertionError("the loop went on after the signal")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == [2, ASKED_AT + 1], "every second step, and the one after which it ends"
    assert met == ["here"], "all ranks are through with the save before one ends"
    try:
        run_block(text, first_step=saved[-1], **names)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == list(range(FIRST, STEPS)), "the next start begins where the save ended"


def block_3(text: str) -> None:
    """A Trainer that gets SIGTERM saves and ends with 75; called again it goes on; a torn save is no save."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "train.py"), Path(folder, "out")
        script.write_text(TRAINER.replace("BLOCK", text))
        first = _steps(script, out, code=75)
        saved = [path.name for path in out.glob("checkpoint-*")]
        torn = out / "checkpoint-19"
        torn.mkdir()
        (torn / "checkpoint-is-incomplete.txt").touch()
        (torn / "trainer_state.json").write_text("{}")
        periodic = out / "checkpoint-18"  # it has no marker
        periodic.mkdir()
        second = _steps(script, out, code=0)
        assert not torn.exists() and not periodic.exists(), "a save that was cut off goes"
    assert 2 <= len(first) < 20, f"it stops before its last step: {first}"
    assert len(saved) == 1, f"it saves once: {saved}"
    at = int(saved[0].removeprefix("checkpoint-"))
    # Before the optimizer's step it looks, too: then it saves the step before, and ends with the one begun.
    assert len(first) - at in (0, 1), f"it saves where it ends: {saved} after {first}"
    assert second == list(range(at + 1, 21)), f"it goes on from there, and not {second}"


def _steps(script: Path, out: Path, code: int) -> list[int]:
    """Run the script, which must end with `code`; the steps that it did."""
    done = subprocess.run(
        [sys.executable, script, out], cwd=out.parent, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == code, (done.returncode, done.stderr[-2000:])
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
