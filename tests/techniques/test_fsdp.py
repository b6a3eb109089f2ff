"""FSDP2 on four ranks: losses, traffic and held bytes, each against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_cases import (
    MANY_STEPS,
    STEPS,
    TINY,
    WORLD,
    model,
    one_process,
    parameter_sizes,
    trained,
)

from utils.ranks import RankError, run_ranks
from utils.techniques.fsdp import check_all_used, no_sync, shard_blocks

P = sum(parameter_sizes())
TOLERANCES = {"fp32": 1e-6, "bf16": 5e-4}
ROOT = 2 * TINY.vocabulary * TINY.hidden + TINY.hidden  # embedding, head, last norm


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_equal_those_of_one_process(precision, accumulation):
    found = trained("FSDP2", precision, accumulation, STEPS)[0].losses
    assert found == pytest.approx(one_process(precision), rel=TOLERANCES[precision])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_of_many_steps_equal_those_of_one_process(precision):
    found = trained("FSDP2", precision, 2, MANY_STEPS)[0].losses
    assert found == pytest.approx(one_process(precision, MANY_STEPS), rel=TOLERANCES[precision])


@pytest.mark.parametrize("precision, unit", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_blocks_are_gathered_twice_and_the_root_once(precision, unit, accumulation):
    """Gradients are reduced in float32 in either precision, and once a step."""
    for run in trained("FSDP2", precision, accumulation, STEPS):
        gathered = unit * (2 * (P - ROOT) + ROOT) // WORLD
        assert run.payloads() == {
            ("all-gather", "float32" if precision == "fp32" else "bfloat16"): accumulation
            * gathered,
            ("reduce-scatter", "float32"): 4 * P,
        }


def test_without_resharding_everything_is_gathered_once():
    for run in trained("FSDP2", "bf16", 1, 2, reshard_after_forward=False):
        assert run.payloads()["all-gather", "bfloat16"] == 2 * P // WORLD


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_16_bytes_per_parameter_over_the_ranks(precision):
    for run in trained("FSDP2", precision, 1, STEPS):
        moment = run.moments["in the step"]
        assert moment.named(".grad") == 4 * P // WORLD
        assert moment.named("exp_avg") == 2 * 4 * P // WORLD
        named = sum(row.bytes for row in moment.rows)
        small = sum(
            row.bytes for row in moment.rows if "'step'" in row.path or "_rank_map" in row.path
        )
        assert named - small == 16 * P // WORLD  # all tensors divide by the ranks: no padding
        assert named == moment.allocated_bytes


def test_accumulating_without_sending_holds_whole_gradients():
    held = trained("FSDP2", "bf16", 2, STEPS)[0].moments
    first, last = (held[f"after backward {n}"].allocated_bytes for n in (0, 1))
    assert first - last > 2 * P


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offload_changes_no_loss(precision):
    plain, offloaded = (
        trained("FSDP2", precision, 1, 5, offload=offload)[0] for offload in (False, True)
    )
    assert offloaded.losses == plain.losses
    assert offloaded.payloads() == plain.payloads()


def test_bad_input_is_a_sentence():
    with pytest.raises(ValueError, match="Linear has no `blocks`: give blocks="):
        shard_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="write 'bf16' or 'fp32'"):
        shard_blocks(model(), precision="fp16")
    with pytest.raises(ValueError, match="no process group here: use shard"):
        shard_blocks(model())
    with pytest.raises(ValueError, match="needs a model that"), no_sync(nn.Linear(2, 2)):
        pass


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_parameters_unused_in_forward_are_named():
    with pytest.raises(ValueError, match="2 parameters are not used in forward: unused.weight"):
        check_all_used(Forgetful(), torch.zeros(2, 4))
    check_all_used(model(), torch.zeros(1, 8, dtype=torch.long))


class InADictionary(Forgetful):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": super().forward(x), "mask": x > 0}


def test_unused_parameters_are_found_whatever_the_forward_returns():
    with pytest.raises(ValueError, match="unused.weight"):
        check_all_used(InADictionary(), torch.zeros(2, 4))


def test_a_model_whose_outputs_depend_on_nothing_that_is_trained():
    check_all_used(nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4))
    forgotten = Forgetful()
    forgotten.used.requires_grad_(False)
    with pytest.raises(ValueError, match="2 parameters are not used in forward: unused.weight"):
        check_all_used(forgotten, torch.zeros(2, 4))


def two_steps(wrap: str) -> bool:
    """Train with a part that forward leaves out; whether that part ever moved."""
    torch.manual_seed(0)
    network = Forgetful()
    before = network.unused.weight.detach().clone()
    wrapped = (
        DistributedDataParallel(network)
        if wrap == "DDP"
        else shard_blocks(network, blocks=[network.used], precision="fp32")
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = network.unused.weight
    return torch.equal(after.full_tensor() if hasattr(after, "full_tensor") else after, before)


def test_ddp_stops_at_unused_parameters_and_fsdp_goes_on():
    with pytest.raises(RankError, match="not used in producing loss|unused parameter"):
        run_ranks(two_steps, 2, "DDP", timeout_seconds=60)
    assert run_ranks(two_steps, 2, "FSDP2", timeout_seconds=60) == [True, True]
