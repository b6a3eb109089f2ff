"""Runs the lines of lesson 07's last cell."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.memory import host_memory, measure

Batch = dict[str, Tensor]


def block_1(text: str) -> None:
    """By hand: the plain run's weights, and of all gradients two on the device after backward."""
    start, model, batches = _model(), _model(), _batches(8)
    with _no_gpu():
        names = run_block(text, model=model, loader=batches)
        offloaded = _bytes_after_backward(model, batches[0], names["optimizer"])
        waiting = [gradient for _, gradient in names["under_way"]]
    plain = _plain(batches)
    kept = _bytes_after_backward(plain, batches[0], plain)
    for before, found, wanted in zip(*(m.parameters() for m in (start, model, plain)), strict=True):
        assert not torch.equal(before, wanted), "nothing was learned"
        # What was learned is compared: the weights themselves hardly move at this rate.
        torch.testing.assert_close(found - before, wanted - before, rtol=1e-4, atol=1e-8)
    gradients = sum(p.nbytes for p in model.parameters())
    told = (
        f"{offloaded:,} bytes after backward, {kept:,} without offload: gradients are {gradients:,}"
    )
    assert len(waiting) == 2, f"{len(waiting)} gradients wait on the device for their copies to end"
    assert offloaded <= kept - gradients + sum(each.nbytes for each in waiting), told


def block_2(text: str) -> None:
    """Three rates and the step that they predict; on a small product, as a CPU's are slow in bf16."""
    printed = io.StringIO()
    with _no_gpu(), contextlib.redirect_stdout(printed):
        names = run_block(text.replace("4096", "64"))
    told = printed.getvalue()
    assert re.findall(r"link, pinned (False|True): [\d.]+ GB/s", told) == ["False", "True"], told
    assert re.search(r"host memory: \d+ GB/s; products: [\d.]+ TFLOP/s", told), told
    assert min(names[rate] for rate in ("F", "B", "HOST")) > 0, told
    operations, parameters = 8 * names["P"] * names["TOKENS"], names["P"]
    # Four micro-batches: 16 - 2 bytes of sums, 4 of gradients in fp32, 2 of weights.
    wanted = operations / names["F"] + parameters * (20 / names["B"] + 42 / names["HOST"])
    assert f"a step by DeepSpeed: {wanted:.1f} s" in told, told


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """The lines without a GPU: its tensors and streams are the CPU's, and nothing is pinned."""
    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like", "ones"):
            stack.enter_context(mock.patch.object(torch, name, _unpinned(getattr(torch, name))))
        for name in ("Stream", "current_stream", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.MagicMock()))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", contextlib.nullcontext))
        stack.enter_context(_host_copies())
        yield


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*sizes: Any, pin_memory: bool = False, device: Any = None, **how: Any) -> Tensor:
        with host_memory() if pin_memory else contextlib.nullcontext():
            return make(*sizes, **how)

    return made


@contextlib.contextmanager
def _host_copies() -> Iterator[None]:
    """Without a GPU both ends are one memory: a copy by `.to("cpu")` then counts as the host's."""
    plain = Tensor.to

    def to(tensor: Tensor, *place: Any, **how: Any) -> Tensor:
        with host_memory() if "cpu" in place else contextlib.nullcontext():
            return plain(tensor, *place, **how)

    with mock.patch.object(Tensor, "to", to):
        yield


def _bytes_after_backward(model: nn.Module, batch: Batch, holder: Any) -> int:
    """What the device holds then; `holder` has the gradients of before, to be dropped first."""

    def step() -> None:
        holder.zero_grad()
        model(**batch).loss.backward()

    run = measure(step, model=model, timed_steps=0, host={})
    return run.timeline.at(run.timeline.end_ns).total_bytes


def _plain(batches: Sequence[Batch]) -> nn.Module:
    """The same training, with everything on the device."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for number, batch in enumerate(batches, 1):
        (model(**batch).loss / 4).backward()
        if number % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _model() -> Any:
    return small_llama(use_cache=False)


def _batches(count: int = 3, rows: int = 4) -> list[Batch]:
    numbers = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (rows, 16), generator=numbers) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]
