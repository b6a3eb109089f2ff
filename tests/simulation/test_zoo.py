"""Programs that people have: all run, or end in a sentence; small ones beside the real allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo_cases
from zoo_cases import DEVICE
from zoo_sharded import ZOO
from zoo_small import SMALL

from utils.memory import measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import SimulationError, simulate

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
NAMES = [
    pytest.param(name, marks=[] if program.small else pytest.mark.slow)
    for name, program in ZOO.items()
]
DEEPCOPIES = ("EMA by deepcopy", "AveragedModel", "TransformerEncoder", "peft LN tuning")
CLOSE = 0.005
SIMULATED_ONLY = ("GRU", "LSTM")  # noted: step by step, and with dropout between layers
QUICK = ("GPT-2", "Llama, padded", "peft LoRA", "EMA", "distillation", "checkpoint")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The same programs where they can run for real, on one thread."""
    threads, zoo_cases.ON[0] = torch.get_num_threads(), "cpu"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    zoo_cases.ON[0] = "cuda"


def run(name: str) -> Any:
    return run_on(name, DEVICE)


def run_on(name: str, device: str) -> Any:
    """A program of the zoo, simulated on a device."""
    program = ZOO[name]
    return simulate(
        program.build,
        program.step,
        device=device,
        values=program.values,
        world=program.world,
        rank=program.rank,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs_or_says_where_it_cannot(name: str) -> None:
    if says := ZOO[name].says:
        with pytest.raises(SimulationError, match=says) as raised:
            run(name)
        assert ", line " in str(raised.value), "names no file and line"
        return
    found = run(name)
    assert found.breakdown.total_bytes == found.peak_bytes > 0
    assert found.reserved_bytes >= found.peak_bytes, "less is reserved than is alive"
    assert found.breakdown["parameters"] > 0, "the model is not on the device"


def test_the_zoo_is_large_and_a_dozen_run_each_time() -> None:
    assert len(ZOO) >= 60 and sum(program.small for program in ZOO.values()) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEPCOPIES)
def test_copies_do_not_take_the_process_down(name: str) -> None:
    peaks = {run(name).peak_bytes for _ in range(20)}
    assert len(peaks) == 1, f"{name} has another peak each time: {peaks}"


def keepers(models: Any) -> dict[str, Any]:
    """What a program keeps beside its model, as its author would name it."""
    several = models.values() if isinstance(models, dict) else [models]
    names = ("averaged", "teacher", "kept")
    return {n: getattr(m, n) for m in several for n in names if hasattr(m, n)}


def both(name: str) -> tuple[int, int]:
    """The peak, simulated and metered."""
    build, step = SMALL[name]
    simulated = simulate(build, step, device="cpu").peak_bytes
    model, optimizer = build()
    real = measure(
        lambda: step(model, optimizer),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
        keep=keepers(model),
    )
    return simulated, real.peak_bytes


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in SMALL
        if name not in SIMULATED_ONLY
    ],
)
def test_simulated_over_metered(name: str) -> None:
    if not isinstance(source_for(torch.device("cpu")), CountingSource):
        pytest.skip("needs the counting allocator, and so a C++ compiler")
    simulated, real = both(name)
    assert simulated == pytest.approx(real, rel=CLOSE), f"{simulated / real:.4f} of the allocator"


def test_later_tracebacks_are_as_before() -> None:
    before = sys.excepthook
    run("checkpoint")
    assert sys.excepthook is before, "a simulation leaves its rank in later tracebacks"
