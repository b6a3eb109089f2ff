"""Traffic does not lie: every operation of torch.distributed is counted, silent, or refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from utils.ranks import RankError, run_ranks
from utils.ranks.position import Frame, position_in
from utils.simulation import extrapolate, simulate
from utils.traffic import UnknownOperation, collectives, counter, traffic

Rows = list[tuple[str, str, int, int]]
FOUR = 4 * 4  # bytes of the tensor that most operations here carry
# These are made of other operators, which the counter sees in their place.
COMPOSED = ("c10d_functional::", "_c10d_functional_autograd::")
REFUSED = "symm_mem::"  # needs memory that GPUs share


def rows(sent: Any) -> Rows:
    return [(row.collective, row.dtype, row.calls, row.payload_bytes) for row in sent.rows]


def test_every_operator_of_torch_distributed_has_a_place():
    """One that a new PyTorch adds fails here by its name, until someone says what it carries."""
    known = {*collectives._KINDS, collectives._BATCH, *collectives._SILENT}
    found = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = {name for name in found if name.partition("::")[0] in collectives._NAMESPACES}
    assert len(found) > 30
    assert {name for name in found if not name.startswith((*COMPOSED, REFUSED))} <= known
    assert known <= found, "PyTorch has no such operators any more"


def point_to_point() -> dict[str, Rows]:
    here, there = torch.ones(4), torch.zeros(4)
    other = 1 - dist.get_rank()
    group = dist.group.WORLD.group_name
    functional = torch.ops._c10d_functional
    found = {}

    def count(name: str, run: Callable[[], Any]) -> None:
        with traffic() as sent:
            run()
        found[name] = rows(sent)

    def one_way() -> None:
        work = dist.isend(here, 1) if dist.get_rank() == 0 else dist.irecv(there, 0)
        work.wait()

    def batch() -> None:
        both = [dist.P2POp(dist.isend, here, other), dist.P2POp(dist.irecv, there, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def functional_way() -> None:
        operate = functional.isend if dist.get_rank() == 0 else functional.irecv
        functional.wait_tensor(operate(here, other, 0, group))

    def functional_batch() -> None:
        kinds = ["isend", "irecv"]
        functional.wait_tensors(
            functional.batch_p2p_ops(kinds, [other] * 2, [0, 0], [here, there], group)
        )

    count("one way", one_way)
    count("batch", batch)
    count("functional", functional_way)
    count("functional batch", functional_batch)
    return found


def test_sends_and_receives_of_every_kind_are_counted():
    for rank, found in enumerate(run_ranks(point_to_point, 2)):
        kind = ["send", "receive"][rank]
        both = [("send", "float32", 1, FOUR), ("receive", "float32", 1, FOUR)]
        assert found["one way"] == found["functional"] == [(kind, "float32", 1, FOUR)]
        assert sorted(found["batch"]) == sorted(found["functional batch"]) == sorted(both)


def everything_else() -> dict[str, Rows]:
    group = dist.group.WORLD.group_name
    whole, half = torch.ones(4), torch.ones(2)
    functional = torch.ops._c10d_functional
    calls = {
        "coalesced": lambda: functional.wait_tensors(
            functional.all_reduce_coalesced_([whole, half], "sum", group)
        ),
        "to another dimension": lambda: functional.wait_tensor(
            torch.ops._dtensor.shard_dim_alltoall(whole.view(2, 2), 0, 1, group)
        ),
        "barriers": lambda: (dist.barrier(), dist.monitored_barrier()),
    }
    found = {}
    for name, call in calls.items():
        with traffic() as sent:
            call()
        found[name] = rows(sent)
    return found


def test_coalesced_and_dimension_changing_operations_are_counted():
    for found in run_ranks(everything_else, 2):
        assert found["coalesced"] == [("all-reduce", "float32", 1, FOUR + FOUR // 2)]
        assert found["to another dimension"] == [("all-to-all", "float32", 1, FOUR)]
        assert found["barriers"] == []


def test_one_call_with_several_types_counts_each():
    """NCCL takes lists of mixed types; each is a row of its own."""

    def reduce(model: nn.Module, optimizer: Any) -> None:
        train(model)
        mixed = [torch.ones(4), torch.ones(2, dtype=torch.bfloat16)]
        torch.ops._c10d_functional.all_reduce_coalesced_(mixed, "sum", dist.group.WORLD.group_name)

    found = rows(_Rows(simulate(lambda: (Resharded(), None), reduce, world=2)))
    assert found[1:] == [("all-reduce", "float32", 1, 16), ("all-reduce", "bfloat16", 1, 4)]


def an_unknown_operation() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("course_gossip(Tensor x) -> Tensor")
    library.impl("course_gossip", lambda x: x.clone(), "CPU")
    with traffic():
        torch.ops.c10d.course_gossip(torch.ones(4))


def test_an_unknown_operation_is_refused_by_name():
    with pytest.raises(RankError, match="c10d::course_gossip communicates, and the counter"):
        run_ranks(an_unknown_operation, 2)


class Resharded(nn.Module):
    """A layer whose output changes from one sharded dimension to the other."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8, 16) for _ in range(layers))
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            whole = DTensor.from_local(rows @ weight, self.mesh, [Shard(0)], run_check=False)
            rows = whole.redistribute(self.mesh, [Shard(1)]).to_local().view(2, -1)[:, :8]
        return rows


def train(model: nn.Module, optimizer: Any = None) -> None:
    model(torch.ones(2, 8)).sum().backward()


def simulated(device: str, layers: int = 1) -> Any:
    return simulate(lambda: (Resharded(layers), None), train, device=device, world=4)


def test_a_simulated_gpu_sends_what_a_gpu_sends():
    """All-to-all, there in forward and back in backward; a CPU takes gloo's all-gather."""
    payload = 2 * 16 * 4
    gpu, cpu = simulated("A100 80GB"), simulated("cpu")
    assert [str(row) for row in gpu.traffic] == ["2 x all-to-all over tp, 256 B of float32"]
    assert rows(_Rows(cpu)) == [("all-gather", "float32", 2, 2 * payload)]
    assert gpu.notes == (gpu.notes[0],) and gpu.notes[0].startswith("Fits")


def test_shards_in_another_dimension_take_their_own_bytes_and_one_copy():
    """64 KiB on each rank before and after; one copy more while they are sent, either way."""
    held = []

    def step(model: nn.Module, optimizer: Any) -> None:
        local = torch.empty(128, 128)
        for source, target in ((0, 1), (1, 0)):
            rows = DTensor.from_local(local, model.mesh, [Shard(source)], run_check=False)
            found = rows.redistribute(model.mesh, [Shard(target)]).to_local()
            held.append((found.shape.numel() * 4, found.untyped_storage().nbytes()))

    found = simulate(lambda: (Resharded(), None), step, world=4)
    size = 128 * 128 * 4
    assert set(held) == {(size, size)}
    assert found.peak_bytes - 8 * 16 * 4 == 4 * size  # both results of the loop, the input, a copy


class _Rows:
    def __init__(self, found: Any) -> None:
        self.rows = found.traffic


def reshard_for_real() -> Rows:
    model = Resharded()
    with traffic() as sent:
        train(model)
    return rows(sent)


def test_a_simulated_cpu_sends_what_gloo_sends():
    assert run_ranks(reshard_for_real, 4)[0] == rows(_Rows(simulated("cpu")))


def test_a_simulation_names_what_its_traffic_leaves_out():
    """Memory is right all the same, so it goes on; an extended one still says so."""

    def gossip(model: nn.Module, optimizer: Any) -> None:
        train(model)
        model(torch.ones(2, 8)).sum().backward()
        torch.ops.c10d.course_gossip(torch.ones(4))

    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("course_gossip(Tensor x) -> Tensor")
    library.impl("course_gossip", lambda x: x.clone(), "CompositeExplicitAutograd")
    try:
        sentence = "Traffic leaves out the bytes of 2 x c10d::course_gossip"
        found = simulate(lambda: (Resharded(), None), gossip, world=2)
        assert found.notes[1].startswith(sentence)
        deep = extrapolate(lambda n: (Resharded(n), None), gossip, layers=20, world=2)
        assert deep.notes[1].startswith(sentence)
    finally:
        library._destroy()


@pytest.mark.parametrize("first", ["pass", "import utils.simulation", "import utils.traffic"])
def test_the_name_counts_whatever_was_loaded_before(first):
    """The package and the function have one name; either can be called."""
    code = f"{first}\nfor _ in range(2):\n    from utils import traffic\n    print(type(traffic()).__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["_GeneratorContextManager"] * 2


def test_outside_of_a_group_there_is_nothing_to_count():
    with pytest.raises(ValueError, match="worker of run_ranks"), traffic():
        pass


def test_the_counter_hides_no_line_of_the_learner():
    """It stands on the stack between the learner's line and the collective that waits."""
    stack = [Frame(counter.__file__, 60, "__torch_dispatch__"), Frame("lesson.py", 3, "step")]
    assert position_in(stack).frame == stack[1]


def test_the_error_names_the_file_to_repair():
    assert "utils/traffic/collectives.py" in str(UnknownOperation("c10d::new"))


def test_a_worker_that_names_the_counter_travels_to_its_rank():
    """`traffic` is the package here, once that is loaded, and the function there."""
    from utils import traffic as counted

    def sent():
        with counted() as found:
            dist.all_reduce(torch.ones(3))
        return found.payload_bytes

    assert run_ranks(sent, 2) == [12, 12]
