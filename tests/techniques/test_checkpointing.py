"""Checkpointing changes memory and nothing else: held against the plain step, bit by bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from utils.models import Transformer, TransformerConfig, UNet, resnet
from utils.techniques import EXPENSIVE, MATMULS, blocks_of, checkpoint_blocks, in_segments
from utils.techniques.checkpointing import fork_random_state

CONFIG = TransformerConfig(vocabulary=64, hidden=64, layers=4, heads=4, feedforward=176)
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"every": 0},
    "every block": {},
    "every 2nd": {"every": 2},
    "a chosen set": {"only": {1, 2}},
    "selective": {"keep": EXPENSIVE},
    "selective on a chosen set": {"only": {0, 3}, "keep": MATMULS},
}


def transformer() -> nn.Module:
    """With dropout in every block, so that a random state that is not replayed shows."""
    model = Transformer(CONFIG)
    for block in model.blocks:
        block.feedforward = nn.Sequential(block.feedforward, nn.Dropout(0.2))
    return model


def image_net() -> nn.Module:
    return resnet(18)


def unet() -> nn.Module:
    return UNet((16, 32, 32), norm="batch", dropout=0.2)


def inputs_of(build: Callable[[], nn.Module]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if build not in (image_net, unet):
        return (torch.randint(64, (2, 16), generator=generator),)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return (images, torch.tensor([3, 70])) if build is unet else (images,)


def trained(build: Callable[[], nn.Module], policy: dict[str, Any] | None, steps: int = 3) -> Any:
    """Losses, gradients of each step and buffers after a few steps of training."""
    torch.manual_seed(0)
    model, inputs = build(), inputs_of(build)
    if policy is not None:
        checkpoint_blocks(model, **policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*inputs).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
    return model, seen, list(model.buffers())


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@functools.cache
def plain(build: Callable[[], nn.Module]) -> Any:
    return trained(build, None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", [transformer, image_net, unet])
def test_every_policy_trains_as_the_plain_step(build: Callable[[], nn.Module], policy: str) -> None:
    _, seen, buffers = trained(build, POLICIES[policy])
    assert same_bits(seen, plain(build)[1])
    assert same_bits(buffers, plain(build)[2])


def test_segments_train_as_the_plain_step() -> None:
    def build() -> nn.Module:
        model = transformer()
        model.blocks = in_segments(model.blocks, 2)
        return model

    model, seen, _ = trained(build, {})
    assert len(model.blocks) == 2
    assert same_bits(seen, plain(transformer)[1])
    with pytest.raises(ValueError, match="size is 0"):
        in_segments(model.blocks, 0)


def test_without_the_random_state_dropout_gives_other_gradients() -> None:
    _, seen, _ = trained(transformer, {"preserve_rng_state": False}, steps=1)
    wanted = plain(transformer)[1][: len(seen)]
    assert torch.equal(seen[0], wanted[0])  # the loss says nothing
    assert not same_bits(seen, wanted)


@pytest.mark.parametrize("build", [image_net, unet])
def test_batch_norm_s_trap_and_its_cure(build: Callable[[], nn.Module]) -> None:
    model, seen, buffers = trained(build, {"freeze_statistics": False})
    wanted_model, wanted, wanted_buffers = plain(build)
    assert same_bits(seen, wanted)  # training: losses and gradients alike
    assert not same_bits(buffers, wanted_buffers)
    inputs = inputs_of(build)
    trapped, right = (m.eval()(*inputs).square().mean() for m in (model, wanted_model))
    wanted_model.train()
    cured = trained(build, {})[0].eval()(*inputs).square().mean()
    assert torch.equal(cured, right)
    assert abs(trapped / right - 1) > 1e-3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_updated_once_even_as_a_cumulative_mean(momentum: float | None) -> None:
    plain_part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum))
    frozen = checkpoint_blocks([copy.deepcopy(plain_part)])[0]
    x = torch.randn(8, 4)
    for model in (plain_part, frozen):
        for _ in range(3):
            model(x).square().mean().backward()
    assert frozen[1].num_batches_tracked == 3
    assert frozen[1].momentum == momentum
    assert same_bits(list(frozen.buffers()), list(plain_part.buffers()))


def test_instance_norm_s_statistics_keep_their_bits() -> None:
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    plain_part = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU())
    frozen = checkpoint_blocks([copy.deepcopy(plain_part)])[0]
    trapped = checkpoint_blocks([copy.deepcopy(plain_part)], freeze_statistics=False)[0]
    for model in (plain_part, frozen, trapped):
        torch.manual_seed(2)
        for _ in range(3):
            model(torch.randn(3, 3, 8, 8)).square().mean().backward()
    assert same_bits(list(frozen.buffers()), list(plain_part.buffers()))
    assert not torch.equal(trapped[1].running_mean, plain_part[1].running_mean)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_norm_without_running_statistics_is_left_alone(norm: type[nn.Module]) -> None:
    part = nn.Sequential(nn.Conv1d(2, 4, 1), norm(4, track_running_stats=False))
    checkpoint_blocks([part])[0](torch.randn(3, 2, 5)).square().mean().backward()
    assert not list(part.buffers())


def test_only_the_gpus_of_the_tensors_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: asked.append(devices))
    card = type("OnCard", (torch.Tensor,), {"is_cuda": True, "get_device": lambda self: 5})
    fork_random_state([torch.ones(1), {"x": torch.ones(1).as_subclass(card)}])
    fork_random_state(torch.ones(1))
    assert asked == [[5], []]


def test_a_second_backward_recomputes_again() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    model = checkpoint_blocks([part])[0]
    before = part[1].num_batches_tracked.item()
    loss = model(torch.randn(8, 4)).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert same_bits(list(first), list(second))
    assert part[1].num_batches_tracked == before + 1


def test_names_and_policies() -> None:
    model = transformer()
    names = list(model.state_dict())
    kinds = [type(block) for block in model.blocks]
    checkpoint_blocks(model, every=3)
    assert list(model.state_dict()) == names
    changed = [i for i, block in enumerate(model.blocks) if type(block) is not kinds[i]]
    assert changed == [0, 3]
    checkpoint_blocks(model, only={2})
    assert [i for i, b in enumerate(model.blocks) if type(b) is not kinds[i]] == [2]
    checkpoint_blocks(copy.deepcopy(model), every=1)
    checkpoint_blocks(model, every=0)
    assert [type(block) for block in model.blocks] == kinds


def test_blocks_of_each_model() -> None:
    assert len(blocks_of(transformer())) == 4
    assert len(blocks_of(resnet(50))) == 16
    assert len(blocks_of(UNet((16, 32, 32)))) == 5
    assert len(blocks_of(nn.Sequential(nn.ReLU(), nn.ReLU()))) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every": -1}, "every is -1"),
        ({"only": {4}}, "There is no block 4: the 4 blocks are 0 to 3"),
    ],
)
def test_impossible_choices_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checkpoint_blocks(transformer(), **arguments)
    with pytest.raises(ValueError, match="Linear shows no blocks"):
        checkpoint_blocks(nn.Linear(2, 2), **arguments)


def test_inference_recomputes_nothing() -> None:
    calls: list[int] = []
    model = checkpoint_blocks([nn.Linear(2, 2)])[0]
    model.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert calls == [1]
    model(torch.ones(1, 2)).square().sum().backward()
    assert len(calls) >= 2
