"""The meter's total, to the byte: its two CPU sources and a second counter agree."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from meter_cases import (
    MeteredProgram,
    Transformer,
    classify,
    infer,
    mlp,
    second_count,
    speak,
    tensor_bytes,
    total_bytes,
)
from torch import nn

from utils.memory import Category, Measurement, measure
from utils.memory.source import CountingSource, EventSource, ProfilerSource

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
SOURCES = [CountingSource, ProfilerSource]


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def metered(case: MeteredProgram, source: EventSource | None = None) -> Measurement:
    """Measure a case without timing it."""
    return measure(
        case.step, model=case.model, optimizer=case.optimizer, timed_steps=0, source=source
    )


def resnet50() -> MeteredProgram:
    model = torchvision.models.resnet50(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return classify(model, optimizer, torch.ones(2, 3, 32, 32))


def frozen() -> MeteredProgram:
    model = Transformer()
    model.embed.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return speak(model)


def small(optimizer: type[torch.optim.Optimizer], **how: object) -> MeteredProgram:
    model = mlp()
    arguments = how.pop("arguments", {})
    return classify(model, optimizer(model.parameters(), **arguments), torch.ones(16, 20), **how)


def compiled() -> MeteredProgram:
    torch._dynamo.reset()
    return speak(torch.compile(Transformer(), backend="aot_eager"))


CASES: dict[str, Callable[[], MeteredProgram]] = {
    "resnet50": resnet50,
    "transformer": lambda: speak(Transformer()),
    "checkpointing": lambda: speak(Transformer(reentrant=False)),
    "checkpointing, reentrant": lambda: speak(Transformer(reentrant=True)),
    "tied weights": lambda: speak(Transformer(tied=True)),
    "frozen layers": frozen,
    "autocast": lambda: speak(Transformer(), autocast=True),
    "autocast, checkpointing": lambda: speak(Transformer(reentrant=False), autocast=True),
    "compiled": compiled,
    "accumulation": lambda: small(torch.optim.Adam, micro_batches=4),
    "zero_grad last": lambda: small(torch.optim.Adam, zero_first=False),
    "gradients kept": lambda: small(torch.optim.Adam, set_to_none=False),
    "gradients kept, zero last": lambda: small(
        torch.optim.Adam, set_to_none=False, zero_first=False
    ),
    "sgd": lambda: small(torch.optim.SGD),
    "momentum": lambda: small(torch.optim.SGD, arguments={"momentum": 0.9}),
    "adam": lambda: small(torch.optim.Adam),
    "adamw, one by one": lambda: small(torch.optim.AdamW, arguments={"foreach": False}),
    "adamw, many at once": lambda: small(torch.optim.AdamW, arguments={"foreach": True}),
    "inference": lambda: infer(mlp(), torch.ones(16, 20)),
}


@pytest.mark.parametrize("name", CASES)
def test_both_sources_and_a_second_counter_agree(name: str) -> None:
    expected = second_count(CASES[name]())
    for source in SOURCES:
        timeline = metered(CASES[name](), source()).timeline
        found = (timeline.peak_bytes, int(timeline.alive_bytes[-1]))
        assert found == expected, source.name
        assert timeline.peak.total_bytes == timeline.peak_bytes
        assert timeline.at(timeline.end_ns).total_bytes == expected.end_bytes


@pytest.mark.parametrize("name", ["transformer", "autocast, checkpointing", "accumulation"])
def test_sources_agree_on_every_phase(name: str) -> None:
    rows = []
    for source in SOURCES:
        timeline = metered(CASES[name](), source()).timeline
        rows.append([(span.name, dict(timeline.at(span.end_ns - 1))) for span in timeline.spans])
    assert rows[0] == rows[1]


def test_without_a_warm_up_the_optimizer_makes_its_state_in_the_metered_step() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()

    first = measure(step, model=model, optimizer=optimizer, timed_steps=0, warmup_steps=0)
    later = measure(step, model=model, optimizer=optimizer, timed_steps=0)
    start = first.timeline.at(first.timeline.start_ns)
    assert start[Category.OPTIMIZER_STATE] == start[Category.GRADIENTS] == 0
    state = first.timeline.at(first.timeline.end_ns)[Category.OPTIMIZER_STATE]
    assert state == later.timeline.at(later.timeline.start_ns)[Category.OPTIMIZER_STATE]


def test_measuring_again_finds_the_same() -> None:
    case = CASES["adam"]()
    first, second = metered(case), metered(case)
    assert dict(first.breakdown) == dict(second.breakdown)
    assert first.peak_phase == second.peak_phase


def test_a_step_worked_out_by_hand() -> None:
    """One linear layer, 30 to 10, batch 4, float32, summed: every byte has a name."""
    model, x = nn.Linear(30, 10), torch.ones(4, 30)
    timeline = measure(lambda: model(x).sum(), model=model, timed_steps=0).timeline
    weights, inputs, output, loss = 4 * (300 + 10), 4 * 120, 4 * 40, 4
    assert timeline.peak_bytes == weights + inputs + output + loss
    assert timeline.peak_phase == "loss"
    assert dict(timeline.peak) == {
        Category.PARAMETERS: weights,
        Category.INPUTS: inputs,
        Category.LOGITS_AND_LOSS: output + loss,
    }


@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_in_one_process(gloo: None, as_view: bool) -> None:
    def wrapped() -> MeteredProgram:
        model = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=as_view)
        optimizer = torch.optim.Adam(model.parameters())
        return classify(model, optimizer, torch.ones(16, 20))

    case = wrapped()
    weights = total_bytes(case.model.parameters())
    # Buckets are as large as the parameters; with views into them they hold the gradients.
    extra = 0 if as_view else weights
    # The profiler misses what gloo's thread frees, which can only raise a count: the least is right.
    counts = [second_count(case, warmup=2, extra_bytes=extra) for _ in range(3)]
    expected = tuple(map(min, zip(*counts, strict=True)))
    for source in SOURCES:
        fresh = metered(wrapped(), source())
        timeline = fresh.timeline
        found = (timeline.peak_bytes, int(timeline.alive_bytes[-1]))
        if source is CountingSource:
            assert found == expected
        else:  # gloo's thread may be the last to hold a bucket, and frees there are not seen
            pairs = zip(found, expected, strict=True)
            assert all(0 <= mine - theirs <= weights for mine, theirs in pairs)
        assert timeline.at(timeline.end_ns)[Category.COMMUNICATION] == extra
        assert timeline.at(timeline.end_ns)[Category.GRADIENTS] == weights


@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_measured_twice(gloo: None, as_view: bool) -> None:
    """One parameter, so that the bucket has its size: one is not taken for the other."""
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(20, 10, bias=False), gradient_as_bucket_view=as_view
    )
    case = classify(model, torch.optim.Adam(model.parameters()), torch.ones(16, 20))
    profiled, *counted = (metered(case, s()).peak_bytes for s in (ProfilerSource, *2 * SOURCES[:1]))
    assert len(set(counted)) == 1
    assert 0 <= profiled - counted[0] <= total_bytes(model.parameters())  # frees in gloo's thread


@pytest.mark.slow  # it compiles for most of a minute
def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that learners use, not only its front end."""
    # Its cache does not ask which vector instructions its code was made for.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fresh() -> MeteredProgram:
        torch._dynamo.reset()
        return classify(
            torch.compile(model := nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 10))),
            torch.optim.SGD(model.parameters()),
            torch.ones(16, 20),
        )

    expected = second_count(fresh())
    for source in SOURCES:
        assert metered(fresh(), source()).peak_bytes == expected.peak_bytes


def test_compiling_is_not_repeated_because_of_the_meter() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    case = speak(torch.compile(Transformer(), backend=counter, fullgraph=True))
    case.step()
    metered(case)
    case.step()
    assert counter.frame_count == 1


def test_memory_of_a_worker_thread_is_counted() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def step() -> None:
        worker = threading.Thread(target=lambda: torch.ones(1000))
        worker.start()
        worker.join()
        F.relu(model(x))

    timeline = measure(step, model=model, timed_steps=0, source=CountingSource()).timeline
    parts = total_bytes(model.parameters()) + tensor_bytes(x)
    assert timeline.peak_bytes == parts + 4000
    assert int(timeline.alive_bytes[-1]) == parts


def test_without_a_compiler_the_profiler_takes_over_and_agrees(tmp_path: Path) -> None:
    script = """
import torch
from test_meter import CASES, metered
from utils.memory.source import prepare, source_for
torch.set_num_threads(1)
print(prepare())
print(source_for(torch.device("cpu")).name)
for name in ("checkpointing", "accumulation", "zero_grad last"):
    print(metered(CASES[name]()).peak_bytes)
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    here = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment |= {
        "PYTHONPATH": here,
        "PATH": "",
        "XDG_CACHE_HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, source, *peaks = done.stdout.splitlines()
    assert said.startswith("CPU memory is read from torch.profiler, one process only. No C++")
    assert source == "torch.profiler"
    names = ("checkpointing", "accumulation", "zero_grad last")
    assert list(map(int, peaks)) == [second_count(CASES[name]()).peak_bytes for name in names]
