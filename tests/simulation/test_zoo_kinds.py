"""Programs of many kinds, simulated beside the real allocator: within half a percent, or a sentence."""

from __future__ import annotations

import pytest
import zoo_ranks
from test_zoo import CLOSE, keepers
from zoo_functions import KINDS
from zoo_ranks import RANKS, WORLD

from utils.memory import measure
from utils.ranks import run_ranks
from utils.simulation import simulate
from utils.simulation.left_out import FORWARDS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # other libraries' own
    pytest.mark.usefixtures("one_thread", "counting"),
]
NOTED = {"forward derivatives": FORWARDS}  # farther off, and the result says so
SLOW = ("selective scan", "LSTMCell", "GRUCell", "MAML", "Mamba", "RWKV", "HuBERT with CTC")
FAMILIES = [name for name in KINDS if hasattr(KINDS[name].build, "func")]
LATER = {*SLOW, *FAMILIES} - {"OPT with LayerDrop"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LATER else []) for n in KINDS]
)
def test_simulated_over_metered(name: str) -> None:
    build, step, values = KINDS[name]
    simulated = simulate(build, step, device="cpu", values=values)
    model, optimizer = build()
    real = measure(
        lambda: step(model, optimizer),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
        keep=keepers(model),
    )
    ratio = simulated.peak_bytes / real.peak_bytes
    if name in NOTED:
        assert NOTED[name] in simulated.notes, f"{ratio:.4f} of the allocator, and no word of it"
    else:
        assert ratio == pytest.approx(1, abs=CLOSE), f"{ratio:.4f} of the allocator"


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, int]:
    """The least of three runs: now and then gloo's own thread lets go of a buffer a little later."""
    runs = [run_ranks(zoo_ranks.measured, WORLD)[0] for _ in range(3)]
    return {name: min(run[name] for run in runs) for name in RANKS}


@pytest.mark.parametrize("name", RANKS)
def test_simulated_over_metered_on_ranks(name: str, on_ranks: dict[str, int]) -> None:
    build, step = RANKS[name]
    found = simulate(build, step, device="cpu", world=WORLD)
    ratio = found.peak_bytes / on_ranks[name]
    assert ratio == pytest.approx(1, abs=CLOSE), f"{ratio:.4f} of the allocator"
