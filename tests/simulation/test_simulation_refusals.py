"""What a simulation cannot do: a sentence with the file and the line, and no error of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import triton
import triton.language as tl
from test_simulation_left_out import adamw, ddp, layer, step
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from utils.simulation import SimulationError, simulate

pytestmark = pytest.mark.filterwarnings("ignore")  # what these ways warn of themselves


def hooked() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(layer())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return adamw(model)


def called() -> Any:
    torch.distributed.rpc.init_rpc("first", rank=0, world_size=1)
    return adamw(layer())


def unsynced(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        step(model, optimizer)


def synced() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer(), nn.BatchNorm1d(64)))


@triton.jit
def incremented(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1)


class Scripted(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)


def flexible(model: nn.Module, _: Any) -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda")
    flex_attention(q, q, q)


def jagged(model: nn.Module, _: Any) -> None:
    rows = [torch.randn(5, 64), torch.randn(9, 64)]
    model(torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")).values().sum()


RANKS = ("communication hook", "SyncBatchNorm", "no_sync()")


@pytest.mark.parametrize(
    ("build", "run", "says"),
    [
        (hooked, step, "communication hook"),
        (lambda: adamw(layer()), lambda m, o: torch.cuda.CUDAGraph(), "CUDA graph"),
        (lambda: adamw(nn.DataParallel(layer(), device_ids=[0, 1])), step, "world=2"),
        (lambda: adamw(layer()), jagged, "jagged"),
        (lambda: adamw(ddp(layer(), static_graph=True)), unsynced, "no_sync()"),
        (lambda: adamw(synced()), step, "SyncBatchNorm"),
        (lambda: adamw(layer()), lambda m, o: incremented[1,](m.weight), "Triton"),
        (lambda: adamw(Scripted().cuda()), step, "ScriptModule"),
        (lambda: adamw(layer()), lambda m, o: torch.zeros(3, device="mps"), "'cuda'"),
        (lambda: adamw(layer()), lambda m, o: torch.export.export(m, (m.weight,)), "exports"),
        (lambda: adamw(layer()), lambda m, o: mp.spawn(int, nprocs=1), "another process"),
        (lambda: adamw(layer()), lambda m, o: m.weight.detach().cpu().share_memory_(), "memory"),
        (lambda: adamw(layer()), flexible, "flex_attention"),
        (called, step, "remote procedure calls"),
        (
            lambda: adamw(layer()),
            lambda m, o: torch.cuda.caching_allocator_alloc(1024),
            "as an address",
        ),
        (
            lambda: adamw(layer()),
            lambda m, o: print(f"{m(torch.ones(64, device='cuda')).sum():.2f}"),
            "values=",
        ),
    ],
)
def test_it_ends_in_a_sentence_with_its_line(
    build: Callable[[], Any], run: Callable[..., Any], says: str
) -> None:
    with pytest.raises(SimulationError, match=r"test_simulation_\w+.py, line \d+") as raised:
        simulate(build, run, world=8 if says in RANKS else 1)
    assert says in str(raised.value)


def test_a_library_may_name_cuda_graphs_in_annotations() -> None:
    """transformers does, in modules that are first imported where a model is built."""

    def annotated(model: nn.Module, _: Any) -> None:
        model(torch.randn(2, 64, device="cuda")).sum().backward()
        assert torch.cuda.CUDAGraph | None

    assert simulate(lambda: adamw(layer()), annotated, device="A10").peak_bytes > 0
