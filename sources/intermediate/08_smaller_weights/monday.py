"""Runs the lines of lesson 08's last cell."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.ranks import run_ranks
from utils.techniques.bitsandbytes_import import bitsandbytes_problem

from .bytes_llama import bytes_llama
from .library_text import held_out_sequences
from .rounding import round_to_nearest
from .weight_only import linears_of


def block_1(text: str) -> None:
    """What rounding costs: the lesson's own, in place, and the head is left."""
    plain, model, batch = bytes_llama(), bytes_llama().train(), held_out_sequences()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = run_block(text, model=model, batch=batch, loss_of=_loss_of)
    for path, layer in linears_of(model.blocks).items():
        before = linears_of(plain.blocks)[path].weight
        expected = round_to_nearest(before, found["bits"], found["group"]).weight()
        # Not to the digit: the lesson keeps scales in 16 bits.
        off, by_lesson = (layer.weight - before).norm(), (expected - before).norm()
        assert abs(off / by_lesson - 1) < 0.02, (
            f"{path}: off by {off:.4f}, the lesson's {by_lesson:.4f}"
        )
    assert torch.equal(model.head.weight, plain.head.weight), "the head was rounded"
    assert not model.training, "dropout would be in both arms"
    assert "of the weights: perplexity +" in said.getvalue(), said.getvalue()
    assert found["share"] > 0.8, f"only {found['share']:.0%} of the weights were rounded"
    assert 0 < found["cost"] < 0.02, f"{found['cost']:.4f} nats is not what few bits cost"


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def block_2(text: str) -> None:
    """In eight bits: the weights of the blocks take half of 16 bits, the output hardly moves."""
    if bitsandbytes_problem():
        return  # nothing can be loaded in eight bits without it
    footprint, plain, off = run_ranks(_in_eight_bits, 1, text)[0]
    assert footprint < 0.62 * plain, f"{footprint:,} bytes, {plain:,} in 16 bits"
    assert off < 0.05, f"the output is off by {off:.1%}"


def _in_eight_bits(text: str) -> tuple[int, int, float]:
    """Bytes in eight bits and in sixteen, and the relative error of the logits."""
    warnings.simplefilter("ignore")  # libraries call each other by old names
    plain, tokens = small_llama(num_hidden_layers=4).eval(), torch.arange(64).view(2, 32)
    with tempfile.TemporaryDirectory() as folder:
        plain.half().save_pretrained(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            model = run_block(text, model_name=folder)["model"]
    size = plain.get_memory_footprint()
    with torch.no_grad():
        expected = plain.float()(tokens).logits
        off = (model(tokens).logits.float() - expected).norm() / expected.norm()
    return model.get_memory_footprint(), size, float(off)
