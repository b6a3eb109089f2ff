"""A small Llama that has really learned something: bytes of Python sources, 0.9 million parameters.

What quantization costs cannot be seen on random weights. This model was trained by
`python -m utils.models.bytes_llama` (a quarter of an hour on two CPU cores) and its weights lie beside
this file in bfloat16, so that a lesson may measure perplexity within its first seconds.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from utils.data.text import text_batches, text_tokens
from utils.models.config import TransformerConfig
from utils.models.transformer import Transformer

FILE = Path(__file__).with_name("bytes_llama.safetensors")
CONFIG = TransformerConfig(hidden=128, layers=4, heads=4, kv_heads=2, feedforward=352)
LENGTH = 128  # tokens of a sequence
TRAINED_TOKENS, HELD_OUT_TOKENS = 4_000_000, 200_000
STEPS, BATCH, PEAK_RATE, SEED = 3_000, 16, 4e-3, 0


def bytes_llama() -> Transformer:
    """The trained model in float32, on the CPU, ready to be evaluated.

    Raises:
        FileNotFoundError: its weights are missing; the sentence says how to make them.
    """
    if not FILE.is_file():
        raise FileNotFoundError(
            f"{FILE.name} is missing beside {Path(__file__).name}. It is part of the repository: "
            "`git checkout` brings it back, `python -m utils.models.bytes_llama` trains it anew."
        )
    model = Transformer(CONFIG)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(FILE).items()})
    return model.eval()


def made_by() -> dict[str, str]:
    """How the weights came about: steps, seed, versions, and the loss at the end."""
    with safe_open(FILE, framework="pt") as file:
        return dict(file.metadata())


def calibration_tokens(sequences: int = 32, seed: int = 1) -> Tensor:
    """Text that the model was trained on: int64 (sequences, LENGTH)."""
    batches = text_batches(text_tokens(TRAINED_TOKENS), sequences, LENGTH, seed)
    return next(batches)[0]


def held_out_batches(batch: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Text that it has not seen: inputs and targets, int64 (batch, LENGTH)."""
    tokens = text_tokens(TRAINED_TOKENS + HELD_OUT_TOKENS)[TRAINED_TOKENS:]
    return text_batches(tokens, batch, LENGTH)


@torch.no_grad()
def perplexity(model: nn.Module, batches: int = 24) -> float:
    """e to the mean cross-entropy of a byte of held-out text, over so many batches of 16 x 128."""
    losses = [
        F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        for inputs, targets in itertools.islice(held_out_batches(), batches)
    ]
    return math.exp(torch.stack(losses).mean())


def train(steps: int = STEPS) -> tuple[Transformer, float]:
    """Train from the seed; the model and the mean loss of the last tenth of its steps."""
    torch.manual_seed(SEED)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    tokens, losses = text_tokens(TRAINED_TOKENS), []
    epochs = itertools.chain.from_iterable(
        text_batches(tokens, BATCH, LENGTH, seed) for seed in itertools.count()
    )
    for inputs, targets in tqdm(itertools.islice(epochs, steps), total=steps, unit="step"):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return model, sum(last) / len(last)


def main() -> None:
    """Train, save, and say how well it does on text that it has not seen."""
    model, loss = train()
    notes = {
        "steps": str(STEPS), "seed": str(SEED), "training_loss": f"{loss:.4f}",
        "text": f"standard library of Python {platform.python_version()}",
        "torch": torch.__version__, "config": json.dumps(CONFIG.__dict__),
    }  # fmt: skip
    save_file({n: t.bfloat16().contiguous() for n, t in model.state_dict().items()}, FILE, notes)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes, perplexity {perplexity(bytes_llama()):.3f}")


if __name__ == "__main__":
    main()
