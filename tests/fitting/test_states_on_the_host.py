"""FSDP2's offload as a cure: its bytes are those of its line of code in a program of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from utils.catalog import device
from utils.fitting import Recipe, Trials, model_config, recipe_step
from utils.fitting.cures import single_cures
from utils.fitting.inputs import micro_batch
from utils.memory.measurement import Measurement
from utils.planner.step_seconds.collectives import bandwidth_in_training
from utils.simulation import simulate
from utils.units import Category

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # other libraries' own
CARD = "RTX 4090"
IN_16_BITS = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BASE = Recipe(method="full", tokens=128, micro_batch=2)


def by_hand(config: Any, cards: int) -> Measurement:
    """What a reader writes: a model in host memory, the cure's line, a loop."""

    def build() -> tuple[Any, Any]:
        model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        for block in model.model.layers:
            fully_shard(block, mp_policy=IN_16_BITS, offload_policy=CPUOffloadPolicy())
        fully_shard(model, mp_policy=IN_16_BITS, offload_policy=CPUOffloadPolicy())
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        tokens = torch.zeros(2, 128, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return simulate(build, step, device=CARD, world=cards)


@pytest.mark.parametrize("cards", [1, 2])
def test_the_cure_takes_what_its_line_takes(cards: int, tiny: Path) -> None:
    config = recipe_step.shallower(model_config(tiny), 4)  # run whole
    with torch.device("meta"):
        parameters = list(hf.AutoModelForCausalLM.from_config(config).parameters())
    count, tensors = sum(p.numel() for p in parameters), len(parameters)
    found = Trials("tiny", config, CARD).verdict(BASE.but(cards=cards, offload_states=True))
    hand, ours = by_hand(config, cards), found.measurement
    copy_bytes = 4 * 2 * 128 * 512  # forward hands its logits out in fp32, as Trainer's does
    assert 0 <= ours.peak_bytes - hand.peak_bytes <= 0.01 * hand.peak_bytes + copy_bytes
    # Weights, gradients and two moments in fp32 are on the host, and on the card no state lasts.
    for run in (hand, ours):
        assert run.host_bytes == pytest.approx(16 * count / cards, rel=0.01)
        assert run.breakdown.get(Category.OPTIMIZER_STATE, 0) <= 512 * tensors  # counters of steps
    assert found.host.startswith("The host holds ")


def test_it_saves_what_the_two_verdicts_differ_by_and_takes_longer(tiny: Path) -> None:
    config = model_config(tiny)
    cure = next(c for c in single_cures(config, BASE) if "offload_states" in c.changes)
    trials = Trials("tiny", config, CARD)
    tried, before = trials.tried(BASE, [cure]), trials.verdict(BASE)
    assert tried.saved_bytes == before.needed_bytes - tried.verdict.needed_bytes > 0
    assert "CPUOffloadPolicy" in cure.line and "PCIe" in cure.costs
    assert tried.row()["costs"].endswith("MiB of tensors on the host")
    up_seconds = (
        2 * 4 * 1.9e6 / bandwidth_in_training(device(CARD).host_link)
    )  # fp32 weights, for both passes
    assert tried.added_seconds and tried.added_seconds > up_seconds


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "qlora"},
        {"optimizer": "adamw-8bit"},
        {"precision": "fp16-mixed"},
        {"offload_states": True},
        {"step_in_backward": True},
    ],
)
def test_it_is_not_tried_where_it_cannot_be(changes: dict[str, Any], tiny: Path) -> None:
    options = single_cures(model_config(tiny), BASE.but(**changes))
    assert not any("offload_states" in cure.changes for cure in options)


def test_the_extended_step_is_the_whole_one(tiny: Path) -> None:
    config = recipe_step.shallower(model_config(tiny), 17)
    recipe = BASE.but(cards=2, method="lora", offload_states=True)
    found = Trials("tiny", config, CARD).verdict(recipe)
    assert "Extended from 4, 5 and 6 layers" in " ".join(found.notes)
    whole = simulate(
        lambda: recipe_step.build(hf.AutoModelForCausalLM, config, recipe),
        lambda model, optimizer: recipe_step.step(
            model, optimizer, micro_batch(config, recipe), recipe
        ),
        device=CARD,
        world=2,
    )
    assert found.peak_bytes == whole.peak_bytes
    assert found.measurement.host_bytes == whole.host_bytes
