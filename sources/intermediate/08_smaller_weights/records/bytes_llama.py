"""`python -m utils.lessons.lesson_08.records.bytes_llama`: train the small Llama of lesson 08, and keep its weights.

Seeded, on the CPU; some minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from utils.data.text import text_batches
from utils.models.transformer import Transformer

from ..bytes_llama import CONFIG, FILE, bytes_llama, perplexity
from ..library_text import LENGTH, held_out_sequences, training_tokens

STEPS, BATCH, PEAK_RATE, SEED = 2_600, 12, 5e-3, 0


def main() -> None:
    """Train, save, and say how well it does on text that it has not seen."""
    model, loss = train()
    notes = {
        "steps": str(STEPS),
        "batch": f"{BATCH} x {LENGTH} tokens",
        "seed": str(SEED),
        "training_loss": f"{loss:.4f}",
        "text": f"standard library of Python {platform.python_version()}",
        "torch": torch.__version__,
        "config": json.dumps(CONFIG.__dict__),
    }
    save_file({n: t.bfloat16().contiguous() for n, t in model.state_dict().items()}, FILE, notes)
    found = perplexity(bytes_llama(), held_out_sequences())
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes, perplexity {found:.3f}")


def train(steps: int = STEPS) -> tuple[Transformer, float]:
    """Train from the seed; the model and the mean loss of the last tenth of its steps."""
    torch.manual_seed(SEED)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1
    )
    losses = []
    for inputs, targets in tqdm(_batches(steps), total=steps, unit="step"):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return model, sum(last) / len(last)


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    tokens = training_tokens()
    epochs = (text_batches(tokens, BATCH, LENGTH, seed) for seed in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), steps)


if __name__ == "__main__":
    main()
