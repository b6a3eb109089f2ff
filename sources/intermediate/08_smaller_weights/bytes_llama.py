"""A small Llama that has really learned something: bytes of Python sources, 0.9 million parameters.

What quantization costs cannot be seen on random weights. `python -m utils.lessons.lesson_08.records.bytes_llama` trained
this model, and its weights lie beside this file in bfloat16, so that a lesson can measure perplexity
within its first seconds.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from utils.models.config import TransformerConfig
from utils.models.transformer import Transformer

FILE = Path(__file__).with_name("bytes_llama.safetensors")
CONFIG = TransformerConfig(hidden=128, layers=4, heads=4, kv_heads=2, feedforward=384)


def bytes_llama(path: Path = FILE) -> Transformer:
    """The trained model in float32, on the CPU, ready to be evaluated.

    Raises:
        FileNotFoundError: its weights are missing.
        ValueError: the file is cut off, or of another model. Both say how to get the weights back.
    """
    cure = (
        "It is part of the repository: `git checkout` brings it back, "
        "`python -m utils.lessons.lesson_08.records.bytes_llama` trains it anew."
    )
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing in {path.parent}. {cure}")
    model = Transformer(CONFIG)
    try:
        with safe_open(path, framework="pt") as file:
            model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path.name} is cut off, or of another model. {cure}") from error
    return model.eval()


def made_by(path: Path = FILE) -> dict[str, str]:
    """How the weights came about: steps, seed, text, versions, and the loss at the end."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@torch.no_grad()
def sequence_losses(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean cross-entropy of each sequence (B, S + 1), a token's target being the next: fp32 (B,)."""
    found = []
    for part in sequences.split(32):
        logits = model(part[:, :-1]).float().transpose(1, 2)
        found.append(F.cross_entropy(logits, part[:, 1:], reduction="none").mean(dim=1))
    return torch.cat(found)


def perplexity(model: nn.Module, sequences: Tensor) -> float:
    """e to the mean cross-entropy of a token of the sequences (B, S + 1)."""
    return sequence_losses(model, sequences).mean().exp().item()
