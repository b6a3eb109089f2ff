"""What lesson 16a says to do on Monday, run: a launch that comes back, a look at ranks, a Trainer that goes on."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

import torch

from utils.files import scratch
from utils.lessons.blocks import run_block
from utils.parallel.loopback import loopback_variables
from utils.ranks.agent import rendezvous_arguments, run_agent
from utils.ranks.killable import run_killable
from utils.ranks.torchrun import run_torchrun

MOST_FAILURES = 24  # that the lesson simulates for a month, on average, at its high rate
_DIES_ONCE = """
import os, signal
import torch.distributed as dist

dist.init_process_group("gloo")
rank, start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"start-{start}-rank-{rank}", "w").close()
if start == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
open(f"done-{rank}", "w").close()
dist.destroy_process_group()
"""
_ALWAYS_FAILS = """
step = int(Path("step").read_text())
stop_a_crash_loop(step, starts=Path("starts"), most=3)
Path("step").write_text("20")  # the first start saves once, later ones do not come so far
dist.barrier()
raise RuntimeError("a bug of the script")
"""
_PLANTED = """
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
look_at_ranks(model, 0.1)
if dist.get_rank() == 0:
    print("so far alike", flush=True)
if dist.get_rank() == 1:
    model.weight.data.view(torch.int32)[3, 5] ^= 1 << 20
look_at_ranks(model, 0.3 if dist.get_rank() == 2 else 0.1)
dist.destroy_process_group()
"""


def block_1(text: str) -> None:
    """A rank is killed, and torchrun with these options starts both again."""
    settings, _, launch = text.replace("\\\n", "").partition("\ntorchrun ")
    exported = dict(
        word.split("=", 1) for word in shlex.split(settings, comments=True)[1:] if "=" in word
    )
    assert len(exported) == 4, f"four variables are exported: {sorted(exported)}"
    *options, script = shlex.split(launch)
    told = dict(option.split("=", 1) for option in options)
    restarts = int(told["--max-restarts"])
    assert restarts > 10 * MOST_FAILURES, (
        f"{restarts} restarts: each failure of a month uses one up"
    )
    kept = [option for option in options if not option.startswith("--rdzv")]
    assert len(options) - len(kept) == 4, f"four options say where and how agents meet: {options}"
    patience = dict(pair.split("=") for pair in told["--rdzv-conf"].split(","))
    assert set(patience) == {"keep_alive_interval", "last_call_timeout"}, f"it sets {patience}"
    assert float(patience["last_call_timeout"]) < 30, (
        "PyTorch's own 30 s would lengthen each return"
    )
    with scratch("monday") as folder:
        (folder / script).write_text(_DIES_ONCE, encoding="utf-8")
        # Agents meet in a file, ranks are two, and the one agent waits a second for the host that is not here.
        conf = {"store_type": "file"} | patience | {"last_call_timeout": "1"}
        words = ",".join(f"{name}={value}" for name, value in conf.items())
        meet = [*rendezvous_arguments(str(folder)), f"--rdzv-conf={words}"]
        arguments = [*kept, "--nproc-per-node=2", *meet, script]
        environment = os.environ | loopback_variables() | {"OMP_NUM_THREADS": "1"}
        failed = run_killable(run_agent, arguments, environment, str(folder), timeout_seconds=60)
        found = {path.name for path in folder.glob("*-*")}
    assert not failed, f"torchrun gave up: {failed}"
    expected = {"start-0-rank-1", "start-1-rank-0", "start-1-rank-1", "done-0", "done-1"}
    assert expected <= found, f"both ranks started again after the kill; found {sorted(found)}"


def block_2(text: str) -> None:
    """A flipped bit and a slow rank are named, equal weights are not; a crash loop comes to an end."""
    _names_ranks(text)
    _ends_a_crash_loop(text)


def _ends_a_crash_loop(text: str) -> None:
    with scratch("monday") as folder:
        (folder / "train.py").write_text(text + _ALWAYS_FAILS, encoding="utf-8")
        (folder / "step").write_text("10", encoding="utf-8")
        options = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=8", "--monitor-interval=0.1"]
        arguments = [*options, *rendezvous_arguments(str(folder)), "train.py"]
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = os.environ | loopback_variables() | variables
        failed = run_killable(run_agent, arguments, environment, str(folder), timeout_seconds=180)
        starts = (folder / "starts").read_text(encoding="utf-8").split()
    assert not failed, f"the third start from one step ends the job as a success does: {failed}"
    assert starts == ["10", "20", "20", "20"], (
        f"a start after a save counts anew; it wrote {starts}"
    )


def _names_ranks(text: str) -> None:
    with scratch("monday") as folder:
        script = folder / "train.py"
        script.write_text(text + _PLANTED, encoding="utf-8")
        said = run_torchrun(script, 3, timeout_seconds=60)
    lines = [line.partition("]: ")[2] or line for line in said.splitlines() if line.strip()]
    odd, slow = "other weights on ranks [1], so go back to a checkpoint", "slow ranks [2]"
    assert len(lines) == 3 and "so far alike" in lines[0], f"it said {lines}"
    assert odd in lines[1] and slow in lines[2], f"it said {lines}"


def block_3(text: str) -> None:
    """A Trainer that is interrupted in step 25 goes on after step 20, with the short timeout."""
    # In a process of its own: transformers loads whatever it finds, such as DeepSpeed.
    run_killable(_trainer_goes_on, text, timeout_seconds=60)


def _trainer_goes_on(text: str) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    shape = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    rows = [{"input_ids": (t := torch.arange(8)), "labels": t} for _ in range(320)]
    with scratch("monday") as folder, contextlib.chdir(folder):
        first = transformers.LlamaForCausalLM(shape)
        calls = _count_calls(first, dies_at=25)
        with contextlib.suppress(KeyboardInterrupt):
            run_block(text, model=first, dataset=rows)
        assert len(calls) == 25, f"the first start was ended in step 25, and not after {len(calls)}"
        Path("out/checkpoint-25").mkdir()  # a save that was cut off
        calls = _count_calls(second := transformers.LlamaForCausalLM(shape))
        found = run_block(text, model=second, dataset=rows)
        kept = sorted(path.name for path in Path("out").glob("checkpoint-*"))
    assert found["trainer"].state.global_step == 40, "the second start comes to the end"
    assert len(calls) == 20, f"the second start did steps 21 to 40, and not {len(calls)} steps"
    assert kept == ["checkpoint-30", "checkpoint-40"], f"two checkpoints stay, and not {kept}"
    assert found["args"].ddp_timeout == 120, "a collective may take two minutes"


def _count_calls(model: torch.nn.Module, dies_at: int | None = None) -> list[int]:
    """A list that grows by each forward pass; at one of them the run is interrupted."""
    calls: list[int] = []

    def count(*_: object) -> None:
        calls.append(len(calls))
        if len(calls) == dies_at:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(count)
    return calls
