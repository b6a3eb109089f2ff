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
    assert text.count("2**20") == 2
    assert text.count("for p in came:") == 1
    text = text.replace(
        "2**20", "2**8"
    )  # these weights are small: sums in several pieces here, too
    start, model, batches = _Sometimes(), _Sometimes(), _batches(12)
    with _no_gpu():
        names = run_block(text, model=model, loader=batches)
        offloaded = _bytes_after_backward(
            model, batches[0], lambda: (names["optimizer"].zero_grad(), names["came"].clear())
        )
        waiting = [gradient for _, gradient in names["under_way"]]
    plain = _plain(batches)
    kept = _bytes_after_backward(plain, batches[0], plain.zero_grad)
    found, wanted = _learned(start, model), _learned(start, plain)
    same = {name for name, change in wanted.items() if not change.any()}
    assert same == {"never", "frozen"}, f"nothing was learned by {same}"
    for name, change in wanted.items():
        # What was learned is compared: the weights themselves hardly move at this rate.
        torch.testing.assert_close(found[name], change, rtol=1e-4, atol=1e-8, msg=name)
    gradients = sum(p.grad.nbytes for p in plain.parameters() if p.grad is not None)
    told = (
        f"{offloaded:,} bytes after backward, {kept:,} without offload: gradients are {gradients:,}"
    )
    assert len(waiting) == 2, f"{len(waiting)} gradients wait on the device for their copies to end"
    assert offloaded <= kept - gradients + sum(each.nbytes for each in waiting), told
    _sums_what_never_came(text, wanted)


def _sums_what_never_came(text: str, wanted: dict[str, Tensor]) -> None:
    """The fault that the set of what came prevents: it is seen in the weights that stayed unused."""
    start, model = _Sometimes(), _Sometimes()
    with _no_gpu():
        run_block(text.replace("in came:", "in masters:"), model=model, loader=_batches(12))
    found = _learned(start, model)
    for name in ("sometimes", "never"):
        assert not torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-8), name


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
    # Four micro-batches: 16 - 2 bytes of sums, 4 of gradients in fp32.
    wanted = operations / names["F"] + parameters * (18 / names["B"] + 42 / names["HOST"])
    assert f"a step by DeepSpeed, about: {wanted:.1f} s" in told, told


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """The lines without a GPU: its tensors and streams are the CPU's, and nothing is pinned."""
    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like", "ones", "randn"):
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


def _bytes_after_backward(model: nn.Module, batch: Batch, drop: Callable[[], Any]) -> int:
    """What the device holds then; `drop` drops the gradients of before."""

    def step() -> None:
        drop()
        model(**batch).loss.backward()

    run = measure(step, model=model, timed_steps=0, host={})
    return run.timeline.at(run.timeline.end_ns).total_bytes


def _plain(batches: Sequence[Batch]) -> nn.Module:
    """The same training, with everything on the device."""
    model = _Sometimes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for number, batch in enumerate(batches, 1):
        (model(**batch).loss / 4).backward()
        if number % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


class _Sometimes(nn.Module):
    """A Llama, and weights that get no gradient: in some batches, in all of them, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = small_llama(use_cache=False)
        self.sometimes = nn.Parameter(torch.linspace(1, 2, 4096))
        self.never = nn.Parameter(torch.ones(64))
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        told = self.llama(input_ids=input_ids, labels=labels)
        if input_ids[0, 0]:
            told.loss = told.loss + (self.frozen[0] * self.sometimes).square().mean()
        return told


def _learned(start: nn.Module, end: nn.Module) -> dict[str, Tensor]:
    """What each weight has moved by."""
    before = dict(start.named_parameters())
    return {name: (p - before[name]).detach() for name, p in end.named_parameters()}


# Of micro-batches: in the first step two of them, not its first; then one; in the third step none.
USED = (1, 2, 7)


def _batches(count: int, rows: int = 4) -> list[Batch]:
    """The first token of a batch says whether it uses `sometimes`."""
    numbers = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (rows, 16), generator=numbers) for _ in range(count)]
    for number, each in enumerate(tokens):
        each[0, 0] = number in USED
    return [{"input_ids": each, "labels": each} for each in tokens]
