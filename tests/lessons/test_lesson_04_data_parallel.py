"""Data parallelism on four real ranks gives what one process gives, and sends what it says."""

import functools

import parallel_cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_cases import (
    KINDS,
    build,
    count,
    mean_loss,
    on_ranks,
    one_process,
    shard_by_shard,
    summed_loss,
    wrapped,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.memory import measure
from utils.models import small_resnet
from utils.ranks import run_ranks, traffic
from utils.simulation import simulate

WORLD = 4
PATIENCE = 300.0  # machines that test may be busy
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


@functools.cache
def trained(kind, dtype, ways=KINDS):
    return run_ranks(on_ranks, WORLD, kind, dtype, ways, timeout_seconds=PATIENCE)


@functools.cache
def reference(kind, dtype):
    return run_ranks(one_process, 1, kind, dtype, timeout_seconds=PATIENCE)[
        0
    ]  # on one thread, like a rank


def deviation(found, wanted):
    """The largest relative difference: of any loss, and of the state after the steps, by its norm."""
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    states = [
        torch.cat([t.flatten().double() for t in one.state.values()]) for one in (found, wanted)
    ]
    return max(*losses, ((states[0] - states[1]).norm() / states[1].norm()).item())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["transformer", "group"])
@pytest.mark.parametrize("way", KINDS)
def test_twenty_steps_equal_one_process(way, kind, dtype):
    for rank in trained(kind, dtype):
        assert deviation(rank[way], reference(kind, dtype)) < TOLERANCE[dtype]


def without_averages(kind, dtype):
    parallel_cases.wrapped = lambda model: model  # each rank on its own part, alone
    return on_ranks(kind, dtype, ("alone",))["alone"]


@pytest.mark.parametrize("kind", ["transformer", "group"])
def test_the_comparison_would_show_what_is_missing(kind):
    """Twenty steps move the weights, and otherwise where the ranks do not average."""
    whole = reference(kind, torch.float64)
    alone = run_ranks(without_averages, WORLD, kind, torch.float64, timeout_seconds=PATIENCE)[0]
    for state in (build(kind, torch.float64).state_dict(), alone.state):
        assert deviation(whole._replace(state=state), whole) > 1000 * TOLERANCE[torch.float32]


def test_batch_norm_equals_a_reference_that_norms_each_part():
    found = trained("batch", torch.float64, ("DDP",))[0]["DDP"]
    by_part = run_ranks(shard_by_shard, 1, "batch", torch.float64, WORLD)[0]
    assert deviation(found, by_part) < 1e-10
    assert deviation(found, reference("batch", torch.float64)) > 1e-2


def rows(sent):
    return {(row.collective, row.dtype): (row.calls, row.payload_bytes) for row in sent.rows}


def traffic_of_a_step(kind, autocast):
    model = build(kind, torch.float32)
    with traffic() as startup:
        parallel = wrapped(model)
    inputs, targets = torch.randn(4, 3, 12, 12), torch.randint(10, (4,))
    steps = []
    for _ in range(4):
        with traffic() as sent:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(parallel(inputs), targets)
            loss.backward()
        steps.append(rows(sent))
    buffers = [(b.nbytes, b.is_floating_point()) for b in model.buffers()]
    sizes = (
        sum(p.nbytes for p in model.parameters()),
        sum(size for size, _ in buffers),
        sum(size for size, is_float in buffers if is_float),
    )
    return sizes, rows(startup), steps[:2], steps[2:]


def payload(sent, collective):
    return {kind: size for (name, kind), (_, size) in sent.items() if name == collective}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_sends_the_gradients_and_no_more(autocast):
    for (gradients, *_), startup, first, later in run_ranks(
        traffic_of_a_step, WORLD, "group", autocast
    ):
        for sent in first + later:
            assert payload(sent, "all-reduce") == {"float32": gradients}
        assert not any(payload(sent, "broadcast") for sent in later)
        assert payload(startup, "broadcast")["float32"] == gradients  # the parameters, once


def test_ddp_agrees_on_its_buckets_in_the_second_step():
    """It orders buckets as gradients came, and rank 0 tells the others: a cost of the start."""
    for _, _, (first, second), _ in run_ranks(traffic_of_a_step, 2, "group", False):
        assert not payload(first, "broadcast")
        assert payload(second, "broadcast").keys() == {"int32"}


def test_batch_norm_sends_its_buffers_before_each_forward():
    for (gradients, buffers, floats), startup, _, later in run_ranks(
        traffic_of_a_step, 2, "batch", False
    ):
        for sent in later:
            assert payload(sent, "all-reduce") == {"float32": gradients}
            assert sum(payload(sent, "broadcast").values()) == buffers
        # Integers as well: DDP's are batch counters, and the shapes that it compares.
        assert payload(startup, "broadcast")["float32"] == gradients + floats


def built():
    torch.manual_seed(0)
    parallel = DistributedDataParallel(small_resnet())
    return parallel, torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)


def resnet_step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,))).backward()
    optimizer.step()


def measured_on_rank():
    model, optimizer = built()
    run = functools.partial(resnet_step, model, optimizer)
    peak_bytes = measure(run, model=model, optimizer=optimizer, timed_steps=0).peak_bytes
    with traffic() as sent:
        run()
    return peak_bytes, rows(sent)


def test_simulated_ddp_agrees_with_four_ranks():
    real = run_ranks(measured_on_rank, WORLD)
    simulated = simulate(built, resnet_step, device="cpu", world=WORLD)
    sent = {
        (t.collective, t.dtype): (t.calls, t.payload_bytes)
        for t in simulated.traffic
        if not t.at_startup
    }
    assert all(rows_of_rank == sent for _, rows_of_rank in real)
    least = min(peak_bytes for peak_bytes, _ in real)
    assert simulated.peak_bytes == pytest.approx(least, rel=0.03)


UNEQUAL = [[3, 11], [7, 5]]  # tokens of each micro-batch, by rank


def micro_batches(rank):
    torch.manual_seed(rank)
    return [(torch.randn(1, n, 6).double(), torch.randint(5, (1, n))) for n in UNEQUAL[rank]]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def weighted_by_tokens():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 5).double())
    with traffic() as sent:
        loss = accumulated_backward(model, micro_batches(dist.get_rank()), summed_loss, count)
    right = gradient(model)
    model.zero_grad()
    for part in micro_batches(dist.get_rank()):
        (mean_loss(model, part) / 2).backward()
    return loss.item(), right, gradient(model), rows(sent)


def test_accumulation_weighs_tokens_not_micro_batches():
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    parts = [part for rank in (0, 1) for part in micro_batches(rank)]
    total = sum(summed_loss(model, part) for part in parts) / sum(map(sum, UNEQUAL))
    total.backward()
    for loss, right, by_micro_batch, sent in run_ranks(weighted_by_tokens, 2):
        assert loss == pytest.approx(total.item(), rel=1e-12)
        assert torch.allclose(right, gradient(model), rtol=1e-12)
        assert (by_micro_batch - right).norm() > 0.05 * right.norm()
        # The tokens, then the gradients once, and the loss.
        assert sent == {("all-reduce", "int64"): (1, 8), ("all-reduce", "float64"): (2, 8 * 35 + 8)}


def test_accumulation_on_one_process_needs_no_group():
    model = nn.Linear(6, 5).double()
    loss = accumulated_backward(model, micro_batches(0), summed_loss, count)
    assert loss > 0 and model.weight.grad is not None


def test_accumulation_refuses_nothing_to_learn_from():
    with pytest.raises(ValueError, match="no micro-batch"):
        accumulated_backward(nn.Linear(2, 2), [], summed_loss, count)
    with pytest.raises(ValueError, match="targets of this step are masked"):
        accumulated_backward(nn.Linear(2, 2), [1], summed_loss, lambda part: 0)
