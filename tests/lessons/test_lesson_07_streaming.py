"""Streamed blocks and links: the plain run's numbers, exact traffic, and two blocks on the device."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils import text_batches, text_tokens
from utils.lessons.lesson_07.link import Link, TokenBucket
from utils.lessons.lesson_07.streaming import stream_blocks
from utils.memory import Category, measure
from utils.models import Transformer, TransformerConfig

SMALL = TransformerConfig(vocabulary=64, hidden=32, layers=4, heads=2, feedforward=64)
BATCHES = list(text_batches(text_tokens(20 * 2 * 16 + 1) % 64, batch=2, sequence=16))
BLOCK = sum(p.numel() for p in Transformer(SMALL).blocks[0].parameters())


def losses(streams: bool, dtype: torch.dtype, ahead: bool = True) -> tuple[list[float], Link]:
    torch.manual_seed(0)
    model, link, found = Transformer(SMALL).to(dtype), Link(), []
    if streams:
        model.blocks, stream = stream_blocks(model.blocks, link, ahead=ahead)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens, targets in BATCHES:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if streams:
            stream.finish()
        optimizer.step()
        found.append(loss.item())
    link.close()
    return found, link


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-4)])
@pytest.mark.parametrize("ahead", [True, False])
def test_losses_are_the_plain_runs(dtype: torch.dtype, within: float, ahead: bool) -> None:
    plain, _ = losses(False, dtype)
    found, link = losses(True, dtype, ahead)
    assert len(plain) == 20
    assert found == pytest.approx(plain, rel=within), "a streamed weight is stale"
    weights = 20 * SMALL.layers * BLOCK * dtype.itemsize
    assert link.bytes("up") == 2 * weights, "each block comes for forward and for backward"
    assert link.bytes("down") == weights, "each gradient leaves once"


def test_at_most_two_blocks_are_on_the_device() -> None:
    torch.manual_seed(0)
    model, link = Transformer(SMALL), Link()
    model.blocks, stream = stream_blocks(model.blocks, link)
    tokens, targets = BATCHES[0]

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        stream.finish()

    found = measure(step, model=model, timed_steps=0, host={"parameters": stream.blocks})
    link.close()
    on_device = found.timeline.series()[Category.COMMUNICATION].max()
    assert 4 * BLOCK <= on_device <= 8 * BLOCK, "the present block, and the next"
    host = found.host.timeline.at(found.host.timeline.end_ns)
    assert host[Category.PARAMETERS] == 4 * SMALL.layers * BLOCK
    assert host[Category.GRADIENTS] == 4 * SMALL.layers * BLOCK
    assert found.timeline.at(found.timeline.end_ns)[Category.PARAMETERS] == 4 * (2 * 64 * 32 + 32)


def test_gradients_add_up_over_micro_batches() -> None:
    torch.manual_seed(0)
    plain, link = Transformer(SMALL), Link()
    model = Transformer(SMALL)
    model.load_state_dict(plain.state_dict())
    model.blocks, stream = stream_blocks(model.blocks, link)
    for one in (plain, model):
        for tokens, targets in BATCHES[:2]:
            F.cross_entropy(one(tokens).flatten(0, 1), targets.flatten()).backward()
    stream.finish()
    link.close()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), "micro-batches are not added up"


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([], "no blocks"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "different shapes"),
        ([nn.BatchNorm1d(2)], "buffers"),
    ],
)
def test_blocks_that_cannot_stream(blocks: list[nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stream_blocks(blocks, Link())


def test_a_slow_link_lets_the_program_go_on() -> None:
    link = Link(1e5)
    start = time.perf_counter()
    coming = link.send_up(torch.ones(5000))  # 20 kB: at least a fifth of a second
    assert not coming.done(), "send_up waits for the transfer"
    assert torch.equal(coming.result(), torch.ones(5000))
    assert time.perf_counter() - start >= 0.2, "no faster than the rate"
    (transfer,) = link.log
    assert (transfer.way, transfer.bytes) == ("up", 20_000)
    link.close()


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_link_has_a_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate)
