"""Simulated worlds against four real ranks: peaks, states, collectives; and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from world_cases import (
    CASES,
    WORLD,
    Built,
    Real,
    Sent,
    on_real_ranks,
    split,
    train,
)

from evidence.validation.simulation_cpu import state_maxima
from utils.memory import Category, Measurement
from utils.models import TransformerConfig
from utils.parallel.dims import ParallelDims
from utils.simulation import SimulationError, simulate
from utils.traffic.collectives import Traffic

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

REPEATS = 5


@pytest.fixture(scope="module")
def real() -> dict[str, Real]:
    return on_real_ranks(REPEATS)


@functools.cache
def simulated(name: str) -> Measurement:
    return simulate(CASES[name], train, device="cpu", world=WORLD)


def sent(found: Measurement, *kinds: str) -> Sent:
    rows = [t for t in found.traffic if t.collective in kinds and not t.at_startup]
    elements = sum(t.payload_bytes // getattr(torch, t.dtype).itemsize for t in rows)
    return Sent(sum(t.calls for t in rows), elements)


@pytest.mark.parametrize("name", CASES)
def test_peak_per_rank(real: dict[str, Real], name: str) -> None:
    tolerance = 0.02 if name.startswith("DDP") else 0.005
    assert simulated(name).peak_bytes == pytest.approx(real[name].peak_bytes, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_states_per_rank(real: dict[str, Real], name: str) -> None:
    assert state_maxima(simulated(name)) == state_maxima(real[name].last)


@pytest.mark.parametrize("name", CASES)
def test_traffic(real: dict[str, Real], name: str) -> None:
    """Gloo gathers by an all-gather, and reduces by an all-reduce, of the whole, in either case."""
    assert sent(simulated(name), "all-gather") == real[name].gathered
    assert sent(simulated(name), "all-reduce", "reduce-scatter") == real[name].reduced


@pytest.mark.parametrize("name", ["FSDP2", "FSDP2, bf16", "TP x FSDP2"])
def test_gathered_parameters_are_communication_in_real_ranks_too(
    real: dict[str, Real], name: str
) -> None:
    """A real rank cannot know of FSDP's flat buffers, which hold as much once more."""
    highest = [
        int(found.timeline.series()[Category.COMMUNICATION].max())
        for found in (real[name].last, simulated(name))
    ]
    assert 0 < highest[0] <= highest[1]


def test_traffic_says_axis_and_type() -> None:
    rows = {(t.collective, t.axis, t.dtype, t.at_startup) for t in simulated("TP x FSDP2").traffic}
    assert rows == {
        ("all-gather", "dp", "float32", False),
        ("reduce-scatter", "dp", "float32", False),
        ("all-reduce", "tp", "float32", False),
        ("scatter", "tp", "float32", True),
    }


def test_a_linear_layer_worked_out_by_hand() -> None:
    """Data parallel over 8: one all-reduce of the gradients, after one broadcast of the weights."""

    def build() -> Built:
        model = nn.parallel.DistributedDataParallel(nn.Linear(30, 10))
        return model, torch.optim.SGD(model.parameters())

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(4, 30)).sum().backward()
        optimizer.step()

    found = simulate(build, step, device="cpu", world=8)
    size = 4 * (300 + 10)
    assert found.traffic == (
        Traffic("all-reduce", "world", "float32", 1, size),
        Traffic("broadcast", "world", "float32", 1, size, at_startup=True),
    )
    assert found.breakdown[Category.COMMUNICATION] == size


def test_every_rank_of_an_uneven_world() -> None:
    """A layer of 10 rows over 4 ranks: 3, 3, 3 and 1."""

    def build() -> Built:
        mesh = init_device_mesh("cpu", (4,))
        model = torch.distributed.fsdp.fully_shard(nn.Linear(8, 10, bias=False), mesh=mesh)
        return model, torch.optim.SGD(model.parameters())

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    states = [
        simulate(build, step, device="cpu", world=4, rank=rank).breakdown[Category.PARAMETERS]
        for rank in range(4)
    ]
    assert states == [4 * 8 * 3] * 4  # FSDP pads the last shard


def mesh_of(*shape: int) -> Callable[[], Built]:
    def build() -> Built:
        init_device_mesh("cpu", shape)
        raise AssertionError("not reached")

    return build


REFUSED: dict[str, tuple[Callable[[], Built], dict[str, int], str]] = {
    "no ranks": (split, {"world": 0}, "world=0 has no ranks"),
    "rank outside": (split, {"world": 4, "rank": 4}, "a world of 4 has ranks 0 to 3"),
    "mesh": (mesh_of(3, 2), {"world": 8}, r"mesh of 3 x 2 takes 6 ranks, .* world of 8"),
    "mesh too large": (mesh_of(16), {"world": 8}, "takes 16 ranks"),
    "heads": (
        functools.partial(split, TransformerConfig(hidden=96, heads=6, feedforward=64)),
        {"world": 4},
        "'blocks.0.attention.query' has 6 heads, .* the 4 ranks",
    ),
    "key-value heads": (
        functools.partial(split, TransformerConfig(hidden=128, heads=8, kv_heads=2)),
        {"world": 4},
        "'blocks.0.attention.key' has 2 heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name: str) -> None:
    build, ranks, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        simulate(build, train, device="cpu", **ranks)
    assert not dist.is_initialized()


def test_an_existing_process_group_is_refused_and_left_alone(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        with pytest.raises(ValueError, match="already belongs to a process group"):
            simulate(split, train, device="cpu", world=WORLD)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_after_an_error_in_the_step_the_next_simulation_works() -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        raise RuntimeError("the learner's own")

    with pytest.raises(RuntimeError, match="the learner's own"):
        simulate(split, step, device="cpu", world=WORLD)
    assert not dist.is_initialized()
    assert simulate(split, train, device="cpu", world=WORLD).peak_bytes > 0


def test_worlds_of_other_sizes_one_after_the_other() -> None:
    """DTensor keeps what it worked out with its mesh, whose groups end with a simulation."""

    def sized(dp: int, tp: int) -> Callable[[], Built]:
        def build() -> Built:
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            model = parallelize_module(
                nn.Sequential(nn.Linear(64, 64), nn.ReLU()), mesh["tp"], {"0": ColwiseParallel()}
            )
            return fully_shard(model, mesh=mesh["dp"]), torch.optim.AdamW(model.parameters())

        return build

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def peaks(worlds: list[tuple[int, int]]) -> list[int]:
        return [simulate(sized(*w), step, world=w[0] * w[1]).peak_bytes for w in worlds]

    worlds = [(2, 4), (4, 2), (1, 2), (2, 1), (1, 1), (8, 1)]
    assert peaks(worlds) == peaks(worlds[::-1])[::-1]


def test_a_world_is_named_by_the_axes_of_a_plan():
    """The same axes in the mesh, in the traffic, and in the place of the rank that is metered."""
    dims = ParallelDims(shard=4, tp=2)

    def build() -> Any:
        mesh = init_device_mesh("cpu", tuple(dims.mesh.values()), mesh_dim_names=tuple(dims.mesh))
        return fully_shard(nn.Linear(64, 64), mesh=mesh["shard"]), None

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 64)).sum().backward()

    found = simulate(build, step, world=dims, rank=dims.rank(shard=3, tp=1))
    assert {row.axis for row in found.traffic} == {"shard"}
    assert found.peak_bytes == simulate(build, step, world=8, rank=7).peak_bytes
    with pytest.raises(ValueError, match="a world of 8 has ranks 0 to 7"):
        simulate(build, step, world=dims, rank=8)


def _flagged(collective: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, None], None]:
    def step(model: nn.Module, _: None) -> None:
        flag = torch.zeros(1)
        out = collective(flag)  # some say how many came, or that they are done
        flag = out if isinstance(out, torch.Tensor) else flag
        if flag.item():
            torch.ones(100)

    return step


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: dist.recv(x, 0),
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)])[0].wait(),
        lambda x: all_reduce(x, "sum", dist.group.WORLD),
    ],
    ids=["recv", "all_reduce", "broadcast", "batch", "functional"],
)
def test_what_other_ranks_send_is_not_known(collective: Callable[[torch.Tensor], Any]) -> None:
    def build() -> tuple[nn.Module, None]:
        return nn.Linear(2, 2), None

    step = _flagged(collective)
    with pytest.raises(SimulationError, match="asks for the value of a tensor"):
        simulate(build, step, device="cpu", world=2, rank=1)
    assumed = simulate(build, step, device="cpu", world=2, rank=1, values={"flag": 1})
    assert assumed.peak_bytes >= 400 and "flag = 1" in " ".join(assumed.notes)


def test_stages_that_vote_are_assumed_to_know_their_shapes() -> None:
    """PyTorch 2.13 asks every stage before the first step; the answer decides no byte."""
    file = Path(torch.distributed.__file__).parent / "pipelining" / "schedules.py"
    names: dict[str, Any] = {}
    exec(compile("def vote(result): return result.item()", str(file), "exec"), names)

    def step(model: nn.Module, _: None) -> None:
        result = torch.zeros(1, dtype=torch.int32)
        dist.recv(result, 0)
        assert names["vote"](result) == 1

    found = simulate(lambda: (nn.Linear(2, 2), None), step, device="cpu", world=2, rank=1)
    assert found.notes == (
        "Assumed in torch/distributed/pipelining: every stage knows the shapes of what it gets.",
    )
