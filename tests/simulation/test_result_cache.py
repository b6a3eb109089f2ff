"""Recalled results look like those that PyTorch works out, share storages alike, and end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from utils.models import Transformer, TransformerConfig
from utils.simulation import simulate
from utils.simulation.message_stream import stream
from utils.simulation.result_cache import SharedResults
from utils.simulation.scratch import cuda_scratch
from utils.simulation.watcher import StorageWatcher
from utils.techniques import checkpoint_blocks

pytestmark = pytest.mark.long

Make = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture
def watcher() -> Iterator[StorageWatcher]:
    watched = StorageWatcher(1, cuda_scratch)
    with FakeTensorMode(), watched:
        yield watched


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    bytes_held = tensor.untyped_storage().nbytes()
    where = (tensor.device, tensor.storage_offset(), bytes_held)
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, keys, *where)


def shared(out: list[torch.Tensor], args: tuple[torch.Tensor, ...]) -> list[list[bool]]:
    storages = [t.untyped_storage()._cdata for t in (*args, *out)]
    return [[a == b for a in storages] for b in storages]


CALLS: dict[str, Make] = {
    "new": lambda a, b: a + b,
    "new, transposed": lambda a, b: torch.empty_like(a.t()),
    "new type": lambda a, b: a.to(torch.bfloat16),
    "view": lambda a, b: a.view(-1),
    "slice": lambda a, b: a[1:, 2:],
    "expanded": lambda a, b: a[:1].expand(9, -1, -1),
    "detached": lambda a, b: a.detach(),
    "in place": lambda a, b: a.mul_(b),
    "argument twice": lambda a, b: torch.add(a, a),
    "several": lambda a, b: torch.max(a, dim=0),
    "list of views": lambda a, b: a.chunk(2),
    "list in place": lambda a, b: torch._foreach_add([a, b], 1.0),
    "into another": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "resizes its result": lambda a, b: torch.add(a, b, out=torch.empty(0)),
    "made of nothing": lambda a, b: torch.zeros(3, 5, dtype=torch.int64),
    "empty": lambda a, b: a[:0].clone(),
    "one value": lambda a, b: a.sum(),
    "conjugate": lambda a, b: torch.complex(a, b).conj(),
    "changes its looks": lambda a, b: a.clone().t_(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_recalled_result_is_the_one_worked_out(name: str, watcher: StorageWatcher) -> None:
    found = []
    for _ in range(3):
        args = torch.ones(4, 6), torch.ones(4, 6)
        out = [t for t in tree_leaves(CALLS[name](*args)) if isinstance(t, torch.Tensor)]
        found.append(([look(t) for t in out], shared(out, args)))
    assert found[0] == found[1] == found[2]


def test_results_are_recalled_at_all(watcher: StorageWatcher) -> None:
    calls = []
    worked_out = watcher._worked_out
    watcher._worked_out = lambda func, *rest: calls.append(func) or worked_out(func, *rest)  # type: ignore[method-assign]
    a = torch.ones(4, 6)
    for _ in range(5):
        (a + a).relu()
    assert calls == [
        torch.ops.aten.ones.default,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.relu.default,
    ]


def test_what_differs_is_not_recalled(watcher: StorageWatcher) -> None:
    a = torch.ones(4, 6)
    assert (a * 2).dtype is torch.float32
    ones = torch.ones(4, 6, dtype=torch.int64)
    assert [(ones * by).dtype for by in (2, 2.0, 2)] == [torch.int64, torch.float32, torch.int64]
    assert [a.sum(dim).shape for dim in (0, 1, 0)] == [(6,), (4,), (6,)]
    assert [a.t().clone().stride(), a.clone().stride()] == [(1, 6), (6, 1)]


BOUND = st.none() | st.integers(-9, 9)
CUTS = st.tuples(st.booleans(), BOUND, BOUND, st.integers(1, 3))


@given(st.lists(CUTS, min_size=1, max_size=12))
def test_slices_look_alike_wherever_they_begin(cuts: list[tuple[Any, ...]]) -> None:
    """Whatever was sliced before: a recalled slice begins where the real one does."""
    source = torch.arange(60.0)[4:52].view(8, 6)
    simulated, ours = FakeTensorMode(), StorageWatcher(1, cuda_scratch)
    for transposed, start, end, step in cuts:
        real = (source.t() if transposed else source)[start:end:step]
        with simulated, ours:
            fake = torch.empty(60)[4:52].view(8, 6)
            found = (fake.t() if transposed else fake)[start:end:step]
        assert (found.shape, found.stride()) == (real.shape, real.stride())
        assert found.storage_offset() == real.storage_offset()
        assert found.untyped_storage()._cdata == fake.untyped_storage()._cdata


def test_one_slice_a_rank_is_worked_out_once(watcher: StorageWatcher) -> None:
    calls = []
    worked_out = watcher._worked_out
    watcher._worked_out = lambda func, *rest: calls.append(func) or worked_out(func, *rest)  # type: ignore[method-assign]
    a = torch.ones(64)
    shards = [a[rank * 4 : rank * 4 + 4] for rank in range(16)]
    assert [shard.storage_offset() for shard in shards] == list(range(0, 64, 4))
    assert calls[1:] == [torch.ops.aten.slice.Tensor]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_slice_that_is_refused_is_refused_in_pytorch_s_words(
    watcher: StorageWatcher, dim: int
) -> None:
    a = torch.ones(4, 6)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.ops.aten.slice.Tensor(a, dim, 0, 1)
    with pytest.raises(RuntimeError, match="slice step must be positive"):
        torch.ops.aten.slice.Tensor(a, 0, 0, 1, 0)


def test_gradients_of_recalled_results(watcher: StorageWatcher) -> None:
    weight = torch.nn.Parameter(torch.ones(6, 6))
    for _ in range(3):
        ((torch.ones(4, 6) @ weight).view(-1)[1:] * 2).sum().backward()
        assert weight.grad is not None and weight.grad.shape == (6, 6)
        weight.grad = None


def test_events_of_each_call_are_the_same(watcher: StorageWatcher) -> None:
    """A call worked out and a call recalled take and give back the same bytes."""
    a = torch.ones(4, 6)
    rows = []
    for _ in range(3):
        watcher.start()
        b = (a + a).view(-1).mul_(2)
        del b
        rows.append([event.bytes for event in watcher.stop()])
    assert rows == [[96, -96]] * 3


def whole_step(
    reuse_results: bool | SharedResults,
    device: str = "A100 80GB",
    hidden: int = 64,
    *,
    world: int = 4,
    rank: int = 0,
) -> Any:
    """Autocast, flash attention, checkpointing, a foreach optimizer and FSDP2: what a lesson simulates."""

    def build() -> tuple[Any, Any]:
        model = Transformer(
            TransformerConfig(vocabulary=64, hidden=hidden, layers=3, heads=4, feedforward=160)
        )
        checkpoint_blocks(model)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model), torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.randint(64, (2, 32)))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(64, (64,))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return simulate(build, step, device=device, world=world, rank=rank, reuse_results=reuse_results)


def agree(plain: Any, cached: Any) -> bool:
    """In peak, categories, what the allocator reserves, traffic, notes, and every event in between."""
    assert plain.peak_bytes == cached.peak_bytes > 0
    assert dict(plain.breakdown) == dict(cached.breakdown) and plain.notes == cached.notes
    assert plain.allocator_bytes == cached.allocator_bytes and plain.traffic == cached.traffic
    return stream(plain.timeline) == stream(cached.timeline)


def test_a_simulation_without_the_cache_finds_the_same():
    assert agree(whole_step(False), whole_step(True))


@pytest.mark.parametrize("device", ["A100 80GB", "T4", "cpu"])
def test_what_other_simulations_have_worked_out_changes_nothing(device: str):
    """Of the same step, of a wider model, and of another device, whose kernels differ."""
    shared = SharedResults()
    whole_step(shared, "H100")
    whole_step(shared, device, hidden=128)
    plain = whole_step(False, device)
    assert agree(plain, whole_step(shared, device)) and agree(plain, whole_step(shared, device))


def test_the_same_device_and_rank_share_and_others_do_not(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    worked_out = StorageWatcher._worked_out
    monkeypatch.setattr(
        StorageWatcher,
        "_worked_out",
        lambda self, func, *rest: calls.append(func) or worked_out(self, func, *rest),
    )

    def needed(*args: Any, **where: int) -> int:
        calls.clear()
        whole_step(shared, *args, **where)
        return len(calls)

    shared = SharedResults()
    first, again = needed("H100"), needed("H100")
    assert again < first / 2, "what has a storage of another kind is worked out each time, no more"
    for name, where in (("T4", {}), ("H100", {"rank": 1}), ("H100", {"world": 2}), ("cpu", {})):
        assert needed(name, **where) > 1.5 * again, f"{name} {where} takes another one's results"
    assert needed("cpu") > 1.5 * again, "kernels of a CPU are asked each time"


def test_what_is_said_of_a_step_is_said_again_by_the_next():
    """A recurrence on a GPU has a remark."""
    shared = SharedResults()

    def build() -> Any:
        model = torch.nn.LSTM(16, 16)
        return model, torch.optim.SGD(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(5, 3, 16))[0].sum().backward()

    first, again = (simulate(build, step, reuse_results=shared) for _ in range(2))
    assert agree(first, again) and agree(simulate(build, step), again)


def test_without_the_cache_every_result_is_worked_out():
    watched = StorageWatcher(1, cuda_scratch, reuse_results=False)
    calls = []
    worked_out = watched._worked_out
    watched._worked_out = lambda func, *rest: calls.append(func) or worked_out(func, *rest)  # type: ignore[method-assign]
    with FakeTensorMode(), watched:
        a = torch.ones(4, 6)
        for _ in range(5):
            (a + a).relu()
    assert calls[1:] == [torch.ops.aten.add.Tensor, torch.ops.aten.relu.default] * 5
