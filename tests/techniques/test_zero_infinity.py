"""DeepSpeed's compiled helpers for real: CPUAdam where it is built, ZeRO-Infinity to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from utils.ranks import run_ranks
from utils.techniques.deepspeed import deepspeed_missing, load_deepspeed
from utils.techniques.deepspeed_ops import build_op, op_problem
from utils.techniques.zero import zero_config, zero_engine

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(deepspeed_missing() is not None, reason="needs DeepSpeed"),
]


WIDE = 8192  # DeepSpeed keeps tensors of less than 1 MiB in memory


def worker(stage: int, offload: dict[str, Any], from_deepspeed: bool, folder: str) -> Any:
    load_deepspeed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, 8)
    )
    count = sum(p.numel() for p in model.parameters())
    config = zero_config(stage, count, world_size=1, micro_batch=4, **offload)
    make: Callable[..., Any] = torch.optim.AdamW
    if from_deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam as make
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.01)
    engine = zero_engine(model, optimizer, config | {"zero_force_ds_cpu_optimizer": False})
    x, y, losses = torch.randn(4, 32), torch.randint(8, (4,)), []
    for _ in range(20):
        loss = F.cross_entropy(engine(x.bfloat16()).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    written = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    return losses, written / count


def test_the_cpu_optimizer_trains_as_torch_s(tmp_path: Path) -> None:
    if problem := op_problem("cpu-adam"):
        pytest.skip(problem)
    cpu = {"offload_optimizer": {"device": "cpu"}}
    (plain, _), (found, _) = (
        run_ranks(worker, 1, 2, cpu, own, str(tmp_path), timeout_seconds=100)[0]
        for own in (False, True)
    )
    assert found == pytest.approx(plain, rel=5e-4), "20 steps apart by more than rounding"


@pytest.mark.slow
def test_zero_infinity_keeps_states_in_a_file(tmp_path: Path) -> None:
    if problem := build_op("async-io"):
        pytest.skip(problem)
    there = {"device": "nvme", "nvme_path": str(tmp_path)}
    plain, _ = run_ranks(worker, 1, 3, {}, False, str(tmp_path), timeout_seconds=100)[0]
    offload = {"offload_optimizer": there, "offload_param": there | {"buffer_size": 1_000_000}}
    found, written = run_ranks(worker, 1, 3, offload, False, str(tmp_path), timeout_seconds=200)[0]
    assert found == pytest.approx(plain, rel=5e-4), "states that went to a file came back changed"
    assert written >= 12, "copies and moments are on the disk"
