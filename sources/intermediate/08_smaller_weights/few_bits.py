"""What the exercises of lab 08 stand on: a layer with its par, and a model rounded layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from utils.models.transformer import Transformer

from .bytes_llama import bytes_llama, sequence_losses
from .gptq import gptq
from .library_text import calibration_tokens, held_out_sequences
from .rounding import InFewBits, output_error, round_to_nearest
from .weight_only import Inputs, inputs_of, linears_of, quantize_weights

FILE = Path(__file__).with_name("gptq_layer.safetensors")
BITS, GROUP = 3, 32  # exercise 1
BROKEN_BITS = 2  # exercise 3
CHOICES = (2, 3, 4, 8)  # bits that exercise 2 may give to a layer
BITS_A_WEIGHT = 3.0  # what exercise 2 may spend on average, scales and zero points included
HELD_OUT = 96  # sequences that exercises 2 and 3 are graded on

Table = dict[str, dict[int, tuple[float, float]]]


@functools.cache
def layer() -> tuple[Tensor, Tensor]:
    """A weight of the lesson's model (384, 128), and the second moments of its inputs."""
    with safe_open(FILE, framework="pt") as file:
        return file.get_tensor("weight").float(), file.get_tensor("moments")


@functools.cache
def recorded() -> dict[str, str]:
    """Which GPTQModel left which error on that layer, by the order of its columns (recorded)."""
    with safe_open(FILE, framework="pt") as file:
        return dict(file.metadata())


def layer_par() -> float:
    """The least error that GPTQModel left."""
    return float(recorded()["columns by activation"])


@functools.cache
def _rounded() -> dict[str, dict[int, tuple[InFewBits, float]]]:
    model = bytes_llama()
    layers = linears_of(model)
    del layers["head"]
    with inputs_of(layers) as seen, torch.no_grad():
        model(calibration_tokens())
    return {path: _by_bits(part.weight, seen[path]) for path, part in layers.items()}


def _by_bits(weight: Tensor, inputs: Inputs) -> dict[int, tuple[InFewBits, float]]:
    found = {}
    for bits in CHOICES:
        made = gptq(weight, inputs.moments, bits, GROUP)
        found[bits] = made, output_error(weight, made.weight(), inputs.moments)
    return found


def choices() -> Table:
    """For each matrix of the model and each number of bits: its bytes, and its output's error."""
    return {
        path: {bits: (made.stored_bytes, error) for bits, (made, error) in row.items()}
        for path, row in _rounded().items()
    }


def budget_bytes() -> float:
    """What exercise 2 may spend on all matrices."""
    return (
        BITS_A_WEIGHT
        / 8
        * sum(part.weight.numel() for part in linears_of(bytes_llama().blocks).values())
    )


@torch.no_grad()
def rounded_model(bits: Mapping[str, int]) -> Transformer:
    """The lesson's model with these matrices in so many bits, by GPTQ; the others stay."""
    model = bytes_llama()
    for path, count in bits.items():
        model.get_submodule(path).get_parameter("weight").copy_(_rounded()[path][count][0].weight())
    return model


def loss_with(bits: Mapping[str, int]) -> float:
    """The loss on text that the model was trained on, with matrices rounded by `rounded_model`."""
    return _loss_with(tuple(sorted(bits.items())))


@functools.cache
def _loss_with(bits: tuple[tuple[str, int], ...]) -> float:
    tokens = calibration_tokens(16, seed=5)
    return sequence_losses(rounded_model(dict(bits)), tokens).mean().item()


def perplexity_with(bits: Mapping[str, int]) -> float:
    """The perplexity that exercise 2 is graded on, of held-out text."""
    return held_out_perplexity(rounded_model(bits))


def held_out_perplexity(model: nn.Module) -> float:
    """The perplexity of a model on text that nothing was fitted to."""
    return sequence_losses(model, held_out_sequences(HELD_OUT)).mean().exp().item()


def calibrated_on(tokens: Tensor) -> Transformer:
    """The lesson's model in two bits by GPTQ, calibrated on these tokens."""
    model = bytes_llama()
    quantize_weights(model, tokens, lambda w, x: gptq(w, x.moments, BROKEN_BITS, GROUP))
    return model


@functools.cache
def without_text() -> float:
    """The perplexity of the model in two bits, rounded to nearest."""
    model = bytes_llama()
    with torch.no_grad():
        for part in linears_of(model.blocks).values():
            part.weight.copy_(round_to_nearest(part.weight, BROKEN_BITS, GROUP).weight())
    return held_out_perplexity(model)
