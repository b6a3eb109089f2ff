"""Runs the lines of lesson 07's last cell."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.memory import host_memory, measure
from utils.ranks import run_ranks
from utils.techniques.deepspeed import load_deepspeed

Batch = dict[str, Tensor]
OFFLOAD = ', "offload_optimizer": {"device": "cpu", "pin_memory": True}'


def block_1(text: str) -> None:
    """By hand: the plain run's weights, and no gradient on the device after backward."""
    start, model, batches = _model(), _model(), _batches()
    with _host_copies():
        optimizer = run_block(text, model=model, loader=batches)["optimizer"]
        offloaded = _bytes_after_backward(model, batches[0], optimizer)
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
    assert offloaded <= kept - gradients, told


def block_2(text: str) -> None:
    """Trainer by DeepSpeed: the weights of ZeRO-2 without offload, its optimizer on the host."""
    assert text.count(OFFLOAD) == 1, f"the block has no {OFFLOAD!r} to leave out"
    with tempfile.TemporaryDirectory() as folder:
        texts = [text, text.replace(OFFLOAD, "")]
        offloaded, plain = run_ranks(_by_trainer, 1, texts, folder, timeout_seconds=200)[0]
    assert offloaded[0] and not plain[0], "DeepSpeed did not offload its optimizer"
    told = f"losses {offloaded[1]} with offload and {plain[1]} without"
    assert abs(offloaded[1] / plain[1] - 1) < 1e-3, told
    start = torch.cat([p.detach().flatten() for p in _model().parameters()]).bfloat16().float()
    assert not torch.equal(start, plain[2]), "nothing was learned"
    torch.testing.assert_close(offloaded[2], plain[2], msg="other weights than without offload")


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
    for batch in batches:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _by_trainer(texts: Sequence[str], folder: str) -> list[tuple[bool, float, Tensor]]:
    """Whether the optimizer is offloaded, the mean loss, and the weights after it, of each text."""
    load_deepspeed()
    import transformers  # after it, so that it is told of DeepSpeed

    asked = partial(transformers.TrainingArguments, use_cpu=not torch.cuda.is_available())
    _model().save_pretrained(folder)  # here: it loads DeepSpeed
    found = []
    for text in texts:
        torch.manual_seed(0)
        rows = [{key: values[0] for key, values in batch.items()} for batch in _batches(16, 1)]
        with (
            tempfile.TemporaryDirectory() as scratch,
            contextlib.chdir(scratch),
            mock.patch.object(transformers, "TrainingArguments", asked),
        ):
            trainer = run_block(text, model_name=folder, dataset=rows)["trainer"]
        engine = trainer.model_wrapped
        weights = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
        loss = trainer.state.log_history[-1]["train_loss"]
        found.append((bool(engine.optimizer.cpu_offload), loss, weights))
    return found


def _model() -> Any:
    return small_llama(use_cache=False)


def _batches(count: int = 3, rows: int = 4) -> list[Batch]:
    numbers = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (rows, 16), generator=numbers) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]
