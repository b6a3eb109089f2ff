"""A step of a Llama's fine-tuning, simulated: what lab 06 tries its choices on."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from utils.catalog import model_shape
from utils.memory import Measurement

MODEL = "llama-3-8b"


def simulated_finetune(method: str, length: int, batch: int) -> Measurement:
    """A step of Llama-3-8B on a simulated RTX 4090; `length` and `batch` of its texts."""
    import transformers  # noqa: F401, before the simulation begins

    from utils.models import llama_config
    from utils.models.finetune import build_finetune, finetune_step
    from utils.simulation import extrapolate

    shape = model_shape(MODEL)

    def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        return build_finetune(llama_config(shape, num_hidden_layers=layers), method)

    step = partial(finetune_step, sequences=batch, length=length)
    return extrapolate(build, step, layers=shape.layers, device="RTX 4090",
                       items=length * batch, unit="tokens", name=method)  # fmt: skip
