"""What a rank holds and what its node sends: DDP's buckets, and HSDP simulated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.lessons.lesson_09.ways import (
    Way,
    fresh_model,
    look,
    plain,
    ring_rounds,
    sent_by_node,
    simulated,
)
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks
from utils.techniques.fsdp import shard_blocks
from utils.traffic.collectives import Traffic
from utils.units import Category

SMALL = TransformerConfig(vocabulary=256, hidden=256, layers=2, heads=2, feedforward=512)
P = sum(p.numel() for p in Transformer(SMALL).parameters())


def adamw(model: torch.nn.Module) -> Way:
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def hsdp() -> Way:
    shape, names = (4, 2), ("replicate", "shard")
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    return adamw(shard_blocks(fresh_model(SMALL), mesh=mesh))


def test_a_ring_leaves_a_node_once_and_each_gpu_has_a_ring_of_its_own_in_hsdp() -> None:
    ring = [
        Traffic("all-reduce", "world", "float32", 1, 800),
        Traffic("all-reduce", "world", "float32", 1, 8000, at_startup=True),
    ]
    assert sent_by_node(ring, 8, 2) == 2 * 7 * 800 // 8
    hybrid = [
        Traffic("all-gather", "mesh_shard", "bfloat16", 1, 800),
        Traffic("all-reduce", "mesh_replicate", "float32", 1, 800),
    ]
    assert sent_by_node(hybrid, 8, 2) == 2 * (2 * 3 * 800 // 4)
    assert sent_by_node(hybrid, 2, 2) == 0


def test_a_round_is_each_parameter_once_in_any_dtype() -> None:
    calls = [
        Traffic("all-reduce", "world", "float32", 2, 4 * 800),
        Traffic("all-gather", "world", "bfloat16", 1, 2 * 200),
    ]
    rounds = ring_rounds(calls, 4, 800)
    assert rounds == {("all-reduce", "float32"): 2, ("all-gather", "bfloat16"): 1}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_simulated_hsdp_holds_a_nodes_share_and_sends_between_nodes_once(
    micro_batches: int,
) -> None:
    run = simulated(hsdp, "HSDP", 8, micro_batches, sequences=8, length=256)
    held = run.breakdown
    assert held[Category.OPTIMIZER_STATE] == pytest.approx(8 * P / 2, rel=0.02)
    # After the first micro-batch the node's sums are there, which no parameter's .grad shows.
    whole = 4 * P / 2 if micro_batches > 1 else 0
    assert held[Category.GRADIENTS] == pytest.approx(whole, rel=0.02, abs=0.5 * P)
    assert sent_by_node(run.traffic, 8, 2) == pytest.approx(2 * 2 * (3 / 4) * 4 * P / 2, rel=0.02)


def _ddp_holds() -> dict[tuple[str, str], int]:
    return look(lambda: adamw(DistributedDataParallel(fresh_model(SMALL))), "DDP").after_backward


def test_ddps_buckets_are_a_second_copy_of_the_gradients() -> None:
    held = run_ranks(_ddp_holds, 2)[0]
    assert held["bucket", "float32"] == held["gradients", "float32"] == 4 * P
