"""Runs the lines of lesson 06's last cell."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.memory import measure
from utils.ranks import run_ranks
from utils.techniques.bitsandbytes_import import bitsandbytes_problem

from .packing import unpatched

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TOKENS = torch.arange(4 * 32).reshape(4, 32) % 64
BATCH = {"input_ids": TOKENS, "labels": TOKENS}  # a Llama caches by default


def block_1(text: str) -> None:
    """By hand: the same function at first, bf16 weights untouched, checkpointed, and it learns."""
    model = _small_llama()
    blocks = model.model.layers
    model.bfloat16()  # before, as the block leaves its parameters
    before, loss = _copied(model), _value(model)
    found = run_block(text, model=model, blocks=blocks)
    assert _value(model) == loss, "new adapters change what the model computes"
    assert not _caches(model), "recomputing would append keys and values again"
    for group in found["optimizer"].param_groups:
        group["lr"] = 1e-2
    losses = [found["step"](BATCH) for _ in range(4)]
    after = {name.replace(".frozen.", "."): p for name, p in model.named_parameters()}
    moved = [name for name, old in before.items() if not torch.equal(after[name], old)]
    assert not moved, f"frozen weights moved: {moved}"
    adapters = sum(p.numel() for name, p in after.items() if name not in before)
    held = sum(p.numel() for group in found["optimizer"].param_groups for p in group["params"])
    assert adapters == held > 0, f"the optimizer holds {held} numbers, the adapters are {adapters}"
    assert losses[-1] < losses[0], "nothing was learned"
    assert {p.dtype for p in after.values() if not p.requires_grad} == {torch.bfloat16}
    peaks = [_peak_bytes(model)]
    for block in blocks:
        del block.forward
    peaks.append(_peak_bytes(model))
    assert peaks[0] < 0.8 * peaks[1], f"{peaks[0]:,} bytes checkpointed, {peaks[1]:,} without"


def block_2(text: str) -> None:
    """By peft and bitsandbytes: a quarter of the weights' bytes, checkpointed, and it learns."""
    if bitsandbytes_problem():
        return  # the page says that nothing is packed without it
    packed, plain, peaks, losses, said = run_ranks(_by_peft, 1, text)[0]
    assert "trainable%" in said, "the trained share is not told"
    assert packed < 0.3 * plain, f"{packed:,} bytes of packed weights, {plain:,} in 16 bits"
    assert peaks[0] < 0.8 * peaks[1], f"{peaks[0]:,} bytes checkpointed, {peaks[1]:,} without"
    assert peaks[1] == peaks[2], "in eval mode nothing is checkpointed, says the page"
    assert losses[1] < losses[0], f"nothing was learned: losses {losses}"


def _by_peft(text: str) -> tuple[int, int, list[int], list[float], str]:
    """Bytes of the blocks' weights packed and in 16 bits, peaks, losses, and what was printed."""
    warnings.simplefilter("ignore")  # libraries call each other by old names
    base = _small_llama().bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        with unpatched(), contextlib.redirect_stdout(io.StringIO()) as said:
            found = run_block(text, model_name=folder)
    model: Any = found["model"]
    kept = model.base_model.model.model.layers.named_parameters()
    packed = sum(p.nbytes for name, p in kept if "base_layer" in name)
    peaks = [_peak_bytes(model), 0, _peak_bytes(model.eval())]
    model.train().base_model.model.gradient_checkpointing_disable()
    peaks[1] = _peak_bytes(model)
    losses = [_value(model)]
    for group in found["optimizer"].param_groups:
        group["lr"] = 1e-2
    _train(model, found["optimizer"])
    plain = sum(p.nbytes for p in base.model.layers.parameters())
    return packed, plain, peaks, [*losses, _value(model)], said.getvalue()


def _peak_bytes(model: nn.Module) -> int:
    def step() -> None:
        model.zero_grad()
        _loss(model).backward()

    return measure(step, model=model, timed_steps=0).peak_bytes


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()


def _loss(model: Callable[..., Any]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**BATCH).loss


def _value(model: nn.Module) -> float:
    with torch.no_grad():
        return _loss(model).item()


def _caches(model: Callable[..., Any]) -> bool:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(**BATCH).past_key_values is not None


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _small_llama() -> LlamaForCausalLM:
    return small_llama(num_hidden_layers=3)
