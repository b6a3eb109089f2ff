"""`python -m utils.lessons.lesson_08.records.gptq_layer`: one layer's inputs, and the error that GPTQModel leaves on them.

The par of lab 08. It needs GPTQModel (`pip install gptqmodel`), in an environment of its own.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from utils.lessons import folders

from ..bytes_llama import bytes_llama
from ..library_text import calibration_tokens
from ..rounding import output_error
from ..weight_only import inputs_of

PATH = folders()["08"] / "gptq_layer.safetensors"
LAYER = "blocks.1.feedforward.gate"
BITS, GROUP, DAMPING = 3, 32, 0.01
ORDERS = {
    "left to right": {"desc_act": False, "act_group_aware": False},
    "groups by activation": {"desc_act": False, "act_group_aware": True},
    "columns by activation": {"desc_act": True, "static_groups": True, "act_group_aware": False},
}


def main() -> None:
    """Write the second moments of the layer's inputs, with GPTQModel's errors beside them."""
    weight, inputs, moments = layer_with_inputs()
    notes = {
        "gptqmodel": version("gptqmodel"),
        "torch": torch.__version__,
        "layer": LAYER,
        "bits": str(BITS),
        "group": str(GROUP),
        "damping": str(DAMPING),
    }
    for name, order in ORDERS.items():
        notes[name] = f"{output_error(weight, by_gptqmodel(weight, inputs, order), moments):.6f}"
    save_file({"moments": moments, "weight": weight.bfloat16()}, PATH, notes)  # no bit is lost
    print(notes)


def layer_with_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The layer's weight, its inputs on the calibration text, and their second moments."""
    model, seen = bytes_llama(), []
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, nn.Linear), f"{LAYER} is no linear layer any more"
    keep = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with inputs_of({LAYER: layer}) as sums, torch.no_grad():
        model(calibration_tokens(seed=7))
    keep.remove()
    return layer.weight.detach(), seen[0], sums[LAYER].moments


def by_gptqmodel(weight: Tensor, inputs: Tensor, order: dict[str, Any]) -> Tensor:
    """The weight that GPTQModel stores, with zero points and in the columns' given order."""
    with mock.patch.object(os, "cpu_count", lambda: 8):  # with fewer its thread pools do not start
        from gptqmodel.quantization import QuantizeConfig  # pyright: ignore[reportMissingImports]
        from gptqmodel.quantization.gptq import GPTQ  # pyright: ignore[reportMissingImports]

        settings = QuantizeConfig(
            bits=BITS, group_size=GROUP, sym=False, damp_percent=DAMPING, **order
        )
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        task = GPTQ(layer, settings)
        task.quantizer.configure(perchannel=True)
        task.add_batch(inputs, None)
        return task.quantize()[0].float()


if __name__ == "__main__":
    main()
