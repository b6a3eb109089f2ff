"""Which device a rank gets; and, where there is a GPU, ranks of a parent that has used it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from utils.ranks import member, rank_device, run_ranks
from utils.ranks.gpus import hide_gpus_unless_enough

ROOT = Path(__file__).resolve().parents[2]


def as_on_a_machine_with(gpus):
    """What a rank would choose there; its group stays one of this machine."""
    chosen = []
    torch.cuda.device_count = lambda: gpus
    torch.cuda.set_device = chosen.append
    backend = member._backend(dist.get_rank(), dist.get_world_size())
    return backend, chosen, str(rank_device())


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("gpus", [0, 1, 4, 8])
def test_ranks_compute_on_a_gpu_each_or_all_on_the_cpu(gpus, world_size):
    for rank, found in enumerate(run_ranks(as_on_a_machine_with, world_size, gpus)):
        if gpus >= world_size:
            assert found == ("cpu:gloo,cuda:nccl", [rank], f"cuda:{rank}")
        else:
            assert found == ("gloo", [], "cpu")


def test_without_a_group_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_device() == torch.device("cpu")


PARENT = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from utils.ranks import rank_device, run_ranks

def worker():
    own = torch.ones(500, 500, device="cuda")  # also where ranks share one GPU by gloo
    total = torch.full((2,), (own @ own)[0, 0].item(), device=rank_device())
    dist.all_reduce(total)
    return total[0].item()

large = torch.randn(500, 500, device="cuda", requires_grad=True)
(large @ large).sum().backward()
torch.cuda.synchronize()
print(run_ranks(worker, {world_size}, share_gpus=True))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parent_that_has_used_the_gpu(world_size):
    script = PARENT.format(root=str(ROOT), world_size=world_size)
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert found.stdout.strip() == str([500.0 * world_size] * world_size), found.stderr


@pytest.mark.parametrize(("gpus", "hidden"), [(0, True), (1, True), (2, False), (8, False)])
def test_too_few_gpus_are_hidden(monkeypatch, gpus, hidden):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    hide_gpus_unless_enough(2, environment)
    assert (environment["CUDA_VISIBLE_DEVICES"] == "") == hidden
    assert environment.get("DS_ACCELERATOR", "") == ("cpu" if hidden else "")


def what_it_sees():
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available(), str(rank_device())


@pytest.mark.parametrize("share", [False, True])
def test_ranks_see_no_gpu_but_one_each_unless_they_share(share):
    seen = run_ranks(what_it_sees, 9, share_gpus=share)
    enough = torch.cuda.device_count() >= 9
    told = {told for told, *_ in seen}
    assert told == ({os.environ.get("CUDA_VISIBLE_DEVICES")} if share or enough else {""})
    assert share or enough or {(there, device) for _, there, device in seen} == {(False, "cpu")}
