"""Small training steps, one per technique, that run for real and simulated alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from torch import nn

from evidence.validation.comparison import Comparison
from utils.memory import Category, Measurement, measure
from utils.memory.source import CountingSource, EventSource
from utils.models import Transformer, TransformerConfig, resnet
from utils.simulation import simulate
from utils.techniques import (
    MATMULS,
    NF4Linear,
    add_lora,
    checkpoint_blocks,
    quantize_linears,
)
from utils.units import MIB

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer | None]]
Step = Callable[[nn.Module, Any], Any]
Pair = tuple[Build, Step]

BATCH, LENGTH = 2, 64
TINY = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.BUFFERS)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW for-loop": functools.partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    # Documented under this name, which the library's `__init__` does not list.
    "AdamW 8-bit": bitsandbytes.optim.AdamW8bit,  # pyright: ignore[reportPrivateImportUsage]
}


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    vocabulary: int = TINY.vocabulary,
) -> None:
    """One step of a language model that returns logits."""
    for _ in range(micro_batches):
        tokens = torch.randint(vocabulary, (BATCH, LENGTH))
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = cross_entropy(model(tokens), tokens)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def classify(
    model: nn.Module, optimizer: Any, *, autocast: torch.dtype | None = None, side: int = 32
) -> None:
    """One step of an image classifier."""
    images, labels = torch.randn(4, 3, side, side), torch.randint(10, (4,))
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def transformer(
    optimizer: str = "AdamW for-loop",
    change: Callable[[Transformer], Any] = lambda model: None,
    **sizes: Any,
) -> Build:
    """A build function: the tiny transformer, changed in place, and an optimizer over the rest."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer(TransformerConfig(**{**vars(TINY), **sizes}))
        change(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, OPTIMIZERS[optimizer](trained)

    return build


def resnet50(optimizer: str = "SGD") -> Build:
    """A build function for ResNet-50 on small images."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = resnet(50)
        return model, OPTIMIZERS[optimizer](model.parameters())

    return build


every_second = functools.partial(checkpoint_blocks, every=2)
keep_matmuls = functools.partial(checkpoint_blocks, keep=MATMULS)


def freeze_bottom(model: Transformer) -> None:
    """Train the last half of the blocks, the last norm and the head only."""
    for part in (model.embed, *model.blocks[: len(model.blocks) // 2]):
        part.requires_grad_(False)


def qlora(model: nn.Module, double_quantization: bool = False) -> None:
    """NF4 base in bf16 with adapters on queries and values."""
    quantize_linears(model.bfloat16(), double_quantization=double_quantization)
    add_lora(model, rank=8)


CASES: dict[str, Pair] = {
    **{f"transformer, {name}": (transformer(name), train) for name in OPTIMIZERS},
    **{f"ResNet-50, {name}": (resnet50(name), classify) for name in OPTIMIZERS},
    "transformer, autocast fp16": (
        transformer(),
        functools.partial(train, autocast=torch.float16),
    ),
    "transformer, autocast bf16": (
        transformer(),
        functools.partial(train, autocast=torch.bfloat16),
    ),
    **{
        f"ResNet-50, autocast {name}": (  # small: many CPUs emulate 16 bits
            resnet50(),
            functools.partial(classify, autocast=dtype, side=16),
        )
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    },
    "transformer, bf16": (transformer(change=lambda model: model.bfloat16()), train),
    "transformer, full checkpointing": (transformer(change=checkpoint_blocks), train),
    "transformer, every 2nd checkpointed": (transformer(change=every_second), train),
    "transformer, selective checkpointing": (transformer(change=keep_matmuls), train),
    "transformer, full checkpointing, autocast": (
        transformer(change=checkpoint_blocks),
        functools.partial(train, autocast=torch.bfloat16),
    ),
    "transformer, full checkpointing, foreach": (
        transformer("AdamW foreach", checkpoint_blocks),
        train,
    ),
    "transformer, grouped queries": (transformer(kv_heads=2), train),
    "transformer, tied": (transformer(tied=True), train),
    "transformer, frozen bottom": (transformer(change=freeze_bottom), train),
    "transformer, LoRA": (transformer(change=add_lora), train),
    "transformer, NF4": (transformer(change=qlora), train),
    "transformer, NF4 double": (
        transformer(change=functools.partial(qlora, double_quantization=True)),
        train,
    ),
    "transformer, accumulation": (transformer(), functools.partial(train, micro_batches=3)),
}


# For a short report: what differs most. The tests run all.
SHORT = (
    "transformer, AdamW for-loop",
    "transformer, AdamW foreach",
    "transformer, AdamW 8-bit",
    "transformer, autocast bf16",
    "transformer, full checkpointing",
    "transformer, selective checkpointing",
    "transformer, LoRA",
    "transformer, NF4",
    "transformer, accumulation",
    "ResNet-50, SGD",
    "ResNet-50, Adam",
)


def both(
    build: Build, step: Step, source: EventSource | None = None
) -> tuple[Measurement, Measurement]:
    """The same two functions, simulated and run for real."""
    simulated = simulate(build, step, device="cpu")
    model, optimizer = build()
    real = measure(
        lambda: step(model, optimizer),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
        source=source,
    )
    return simulated, real


def state_maxima(found: Measurement) -> dict[Category, int]:
    """The largest size that each kind of state has during the step."""
    maxima: dict[Category, int] = {}
    for state in STATES:
        alive, highest = 0, 0
        events = [(a.born_ns, a.bytes) for a in found.timeline.allocations if a.category is state]
        events += [
            (a.died_ns, -a.bytes)
            for a in found.timeline.allocations
            if a.category is state and a.died_ns is not None
        ]
        for _, size in sorted(events):
            alive += size
            highest = max(highest, alive)
        maxima[state] = highest
    return maxima


def cpu_comparisons(names: Iterable[str] = tuple(CASES)) -> Iterator[Comparison]:
    """Peaks of small steps beside this machine's counting allocator, by model; MiB.

    On one thread: kernels, and so their scratch memory, depend on the number of threads.

    Raises:
        CompilerError: the counting allocator needs a C++ compiler.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            build, step = CASES[name]
            simulated, real = both(build, step, source=CountingSource())
            model, _, technique = name.partition(", ")
            yield Comparison(
                f"CPU allocator, {model}",
                "peak MiB",
                technique,
                real.peak_bytes / MIB,
                simulated.peak_bytes / MIB,
                _parameter_count(build),
            )
    finally:
        torch.set_num_threads(threads)


def _parameter_count(build: Build) -> int:
    """Parameters as numbers, also where they are packed to four bits."""
    model, _ = build()
    packed = {id(layer.weight) for layer in model.modules() if isinstance(layer, NF4Linear)}
    return sum(p.numel() * (2 if id(p) in packed else 1) for p in model.parameters())
