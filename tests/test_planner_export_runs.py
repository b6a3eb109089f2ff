"""Exported scripts train on four real ranks, and lose what one process loses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from export_cases import (
    CASES,
    DEEP,
    HALF,
    MIXED,
    TIED,
    TINY,
    on_real_ranks,
    one_process,
    start_weights,
    tiny,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """What every run of a model starts from."""
    folder = tmp_path_factory.mktemp("weights")
    return {model.name: start_weights(model, folder) for model in (TINY, TIED, DEEP)}


@pytest.fixture(scope="module")
def plain(weights):
    """What one process loses, by model."""
    return {m.name: one_process(m, weights[m.name]) for m in (TINY, TIED, DEEP)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_one_process(name, weights, plain):
    found = CASES[name]
    losses = on_real_ranks(found, weights[found.model.name])
    assert losses == pytest.approx(plain[found.model.name], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("found", [MIXED, HALF], ids=["mixed", "half"])
def test_losses_in_bf16_are_near(found, weights, plain):
    losses = on_real_ranks(found, weights[found.model.name])
    assert losses == pytest.approx(plain[found.model.name], rel=5e-4)


@pytest.mark.slow
def test_the_torchrun_line_starts_the_script(tmp_path):
    found = tiny(dp=2, zero_stage=3, gpus=2)
    found.write(tmp_path)
    weights = start_weights(TINY, tmp_path)
    words = found.torchrun.split()
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:-1]]
    command += [str(tmp_path / words[-1]), "--steps", "1", "--weights", str(weights)]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"step 0 loss {one_process(TINY, weights)[0]:.4f}" in done.stdout
