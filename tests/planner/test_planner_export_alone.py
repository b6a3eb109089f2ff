"""An exported folder trains where the course is not: three axes, eight ranks, torch alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch
from export_cases import DEEP, one_process, plain_gradients, start_weights, tiny
from open_ports import watched

# Run in place of train.py: runs it, and keeps the gradients of its first step, its losses, and what
# is left when the process group ends.
KEEPER = """\
import gc, importlib.util, json, runpy

import torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
import utils
import utils.parallel.train as loop

adamw, clip, report, destroy = loop.adamw, loop.clip_grad_norm, loop.report, dist.destroy_process_group
named, kept, norms = {}, {}, []

def naming(parts, learning_rate):
    for part in parts:
        named.update(part.named_parameters())
    return adamw(parts, learning_rate)

def keeping(optimizer, mesh, limit):
    if not kept:
        kept.update({name: p.grad.full_tensor() for name, p in named.items()})
        named.clear()
        if not mesh.get_local_rank("shard") and not mesh.get_local_rank("tp"):
            torch.save(kept, f"gradients-{mesh.get_local_rank('pp')}.pt")
    norms.append(clip(optimizer, mesh, limit).item())
    return norms[-1]

def saving(losses, first=0):
    found = report(losses, first)
    if dist.get_rank() == 0:
        others = [name for name in ("transformers", "deepspeed") if importlib.util.find_spec(name)]
        json.dump([found, utils.__file__, others], open("losses.json", "w"))
    return found

def leaving():
    held = (FSDPModule, torch.optim.Optimizer)
    left = [type(o).__name__ for o in gc.get_objects() if issubclass(type(o), held)]
    json.dump([left, norms[0]], open(f"left-{dist.get_rank()}.json", "w"))
    destroy()

loop.adamw, loop.clip_grad_norm, loop.report, dist.destroy_process_group = naming, keeping, saving, leaving
runpy.run_path("train.py", run_name="__main__")
"""


def needed_by(distribution: str, found: set[str] | None = None) -> set[str]:
    """The installed distributions that one needs, itself included."""
    found = set() if found is None else found
    if distribution not in found:
        found.add(distribution)
        for text in metadata.requires(distribution) or ():
            name = re.split(r"[^\w.-]", text)[0]
            with contextlib.suppress(metadata.PackageNotFoundError):
                if "extra ==" not in text and metadata.version(name):
                    needed_by(name, found)
    return found


def torch_alone(folder: Path) -> Path:
    """A Python that has torch and what torch needs, and nothing else of the course."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for distribution in needed_by("torch"):
        for file in metadata.files(distribution) or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(
                    Path(str(metadata.distribution(distribution).locate_file(top)))
                )
    return folder / "bin" / "python"


@pytest.fixture(scope="module", params=[5, pytest.param(20, marks=pytest.mark.slow)])
def steps(request):
    return request.param


@pytest.fixture(scope="module")
def folder(steps, tmp_path_factory):
    """The exported folder after its torchrun line has run in it."""
    folder = tmp_path_factory.mktemp("alone") / "a job"
    found = tiny(
        DEEP,
        gpus=8,
        dp=2,
        tp=2,
        pp=2,
        zero_stage=1,
        micro_batch=2,
        sequence_parallel=True,
        recompute="full",
    )
    found.write(folder)
    start_weights(DEEP, folder)
    (folder / "keeper.py").write_text(KEEPER)
    words = shlex.split(found.torchrun)
    start = words.index("torchrun")
    variables = dict(word.split("=") for word in words[:start])
    python = torch_alone(tmp_path_factory.mktemp("python"))
    command = [str(python), "-m", "torch.distributed.run", *words[start + 1 : -1], "keeper.py"]
    command += ["--steps", str(steps), "--weights", "deep.pt"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    with watched() as doors:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400
        )
    assert done.returncode == 0, done.stderr
    assert f"step {steps - 1} loss" in done.stdout
    assert len(doors.listening) > 8, "a store, and gloo's own of each rank"
    assert not doors.open
    return folder


def at_the_end(folder: Path) -> list[tuple[list[str], float]]:
    """What each rank still held, and its norm of the first step's gradient."""
    return [json.loads((folder / f"left-{rank}.json").read_text()) for rank in range(8)]


def test_losses_equal_those_of_one_process(folder, steps):
    losses, package, others = json.loads((folder / "losses.json").read_text())
    assert Path(package).is_relative_to(folder)
    assert others == []
    assert losses == pytest.approx(one_process(DEEP, folder / "deep.pt", steps), rel=1e-5)
    assert len(losses) == steps


def test_gradients_of_the_first_step_equal_those_of_one_process(folder):
    plain, found = plain_gradients(DEEP, folder / "deep.pt"), {}
    for stage in range(2):
        found |= torch.load(folder / f"gradients-{stage}.pt")
    assert found.keys() == plain.keys()
    norm = torch.stack([grad.norm() for grad in plain.values()]).norm()
    apart = torch.stack([(found[name] - grad).norm() for name, grad in plain.items()]).norm()
    assert apart <= 1e-6 * norm


def test_nothing_holds_the_process_group_when_it_ends(folder):
    assert [left for left, _ in at_the_end(folder)] == [[]] * 8


def test_all_ranks_clip_by_the_norm_of_the_whole_gradient(folder):
    """AdamW hardly notices a wrong scale, so losses do not show it."""
    grads = plain_gradients(DEEP, folder / "deep.pt").values()
    norm = torch.stack([grad.norm() for grad in grads]).norm().item()
    assert [found for _, found in at_the_end(folder)] == pytest.approx([norm] * 8, rel=1e-5)
