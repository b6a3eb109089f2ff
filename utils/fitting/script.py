"""`train.py`: the program of a recipe as a file that needs no course, with the parts that it uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from utils.fitting import program, script_run
from utils.fitting.recipe import Recipe
from utils.fitting.verdict import FitVerdict

LEAST_SPARE_SHARE = 0.02  # of the card: what the longest batch and the driver may still take
_HEADER = '''"""Trains {name}: {recipe}.

Simulated on one {card}: tensors take {peak:.2f} GiB at the peak, the allocator {needed:.2f} GiB. The first
three steps print what this machine takes beside it.

{install}
{launch}
"""'''
_FOUR_BITS = """FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=PRODUCTS,
)"""


def script(verdict: FitVerdict, auto: type, source: str) -> str:
    """The text of `train.py` for a language model.

    Args:
        verdict: Of the recipe, with the simulated step.
        auto: The Auto class that loads the model.
        source: What the script loads: a name on the Hub, or a folder.

    Raises:
        ValueError: functions of one's own, or a model that takes more than text.
    """
    recipe = verdict.recipe
    if recipe is None or not auto.__name__.endswith("ForCausalLM"):
        raise ValueError(
            "A script is written for language models, which are trained on text alone. For this one "
            "take the lines of the cures into your own program."
        )
    text = "\n\n\n".join(
        [
            "\n".join(_top(verdict, recipe, auto, source)),
            *map(_text, _parts(recipe)),
            "\n".join(_make(recipe, auto)),
            *map(_text, script_run.PARTS),
            "\n".join(_main(recipe)),
        ]
    )
    return f"{text}\n"


def _text(part: Callable[..., Any]) -> str:
    """A function as it is written, without what is said to a type checker."""
    return re.sub(r"  # pyright: ignore.*", "", inspect.getsource(part)).rstrip()


def launch_line(recipe: Recipe) -> str:
    """How the script is started."""
    if recipe.cards > 1:
        return f"torchrun --nproc-per-node {recipe.cards} train.py texts.txt"
    return "python train.py texts.txt"


def requirements(recipe: Recipe) -> str:
    """What the script imports, for pip."""
    names = ["torch", "transformers"]
    names += ["accelerate"] if recipe.autocast else []
    names += ["peft"] if recipe.is_frozen else []
    names += ["bitsandbytes"] if recipe.needs_bitsandbytes else []
    return " ".join(names)


def _top(verdict: FitVerdict, recipe: Recipe, auto: type, source: str) -> Iterator[str]:
    gib = 2**30
    yield _HEADER.format(
        name=source,
        recipe=recipe,
        card=verdict.card,
        peak=verdict.peak_bytes / gib,
        needed=verdict.needed_bytes / gib,
        install=f"pip install {requirements(recipe)}",
        launch=launch_line(recipe),
    )
    extra = ", BitsAndBytesConfig" if recipe.method == "qlora" else ""
    yield from (
        "import contextlib",
        "import json",
        "import os",
        "import sys",
        "from collections.abc import Iterable, Iterator, Sequence",
        "from pathlib import Path",
        "from typing import Any",
        "",
        "import torch",
        "import torch.distributed as dist",
        "from torch import nn",
        f"from transformers import {auto.__name__}, AutoTokenizer{extra}",
        "",
        f"SOURCE = {source!r}",
        f"TOKENS, MICRO_BATCH, ACCUMULATION = {recipe.tokens}, {recipe.micro_batch}, {recipe.accumulation}",
        "EPOCHS, LEARNING_RATE, SEED = 1, 1e-4, 0",
        f"SIMULATED_PEAK_BYTES = {verdict.peak_bytes:_}",
        f"LEAST_SPARE_BYTES = {int(LEAST_SPARE_SHARE * verdict.usable_bytes):_}  # else it stops after three steps",
    )
    if recipe.method == "qlora":
        kind = "torch.float16" if recipe.products == "fp16" else "torch.bfloat16"
        yield from _FOUR_BITS.replace("PRODUCTS", kind).splitlines()


def _parts(recipe: Recipe) -> Iterator[Callable[..., Any]]:
    if recipe.checkpointing:
        yield program.checkpoint_blocks
    if recipe.is_frozen:
        yield program.add_adapters
    if recipe.is_sharded:
        yield program.shard
    if recipe.autocast:
        yield program.autocast_forward
    yield program.make_optimizer
    if recipe.step_in_backward:
        yield program.step_in_backward
    if recipe.offload_activations:
        yield program.on_the_host
    if recipe.loss == "chunked":
        yield program.chunk_loss
    yield program.train_step


def _make(recipe: Recipe, auto: type) -> Iterator[str]:
    """The function that makes model and optimizer."""
    weights = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
    packing = ", quantization_config=FOUR_BITS" if recipe.method == "qlora" else ""
    # FSDP2 takes the model from host memory: blocks move to the GPU one by one, as they are sharded.
    placed = "" if recipe.is_sharded else ', device_map={"": device}'
    yield "def make(source: str, device: str) -> tuple[Any, Any]:"
    yield '    """The model on its device, as it is trained, and its optimizer."""'
    yield "    model: Any = " + f"{auto.__name__}.from_pretrained("
    yield f"        source, dtype={weights[recipe.weights]}{placed}{packing}"
    yield "    )"
    yield "    model.config.use_cache = False"
    if recipe.checkpointing:
        spared = f", spared={recipe.spared}" if recipe.spared else ""
        yield f"    checkpoint_blocks(model, every={recipe.checkpointing}{spared})"
    if recipe.loss == "chunked":
        yield "    chunk_loss(model)"
    if recipe.is_frozen:
        targets = recipe.targets if isinstance(recipe.targets, str) else list(recipe.targets)
        yield f"    model = add_adapters(model, rank={recipe.rank}, targets={targets!r})"
    if recipe.is_sharded:
        gathered = f", {weights[recipe.autocast]}" if recipe.autocast else ""
        yield f"    shard(model{gathered}{', offload=True' * recipe.offload_states})"
    if recipe.autocast:
        yield f"    autocast_forward(model, device.partition(':')[0], {weights[recipe.autocast]})"
    yield "    model.train()"
    if recipe.step_in_backward:
        yield f"    step_in_backward(model, {recipe.optimizer!r}, LEARNING_RATE)"
        yield "    return model, None"
    else:
        yield f"    return model, make_optimizer({recipe.optimizer!r}, model.parameters(), LEARNING_RATE)"


def _main(recipe: Recipe) -> Iterator[str]:
    context = "on_the_host" if recipe.offload_activations else "contextlib.nullcontext"
    scaler = (
        "torch.amp.GradScaler(device.partition(':')[0])"
        if recipe.precision == "fp16-mixed"
        else "None"
    )
    yield "def main(texts: str, source: str = SOURCE, steps: int | None = None) -> list[float]:"
    yield '    """Train on a file of text; the losses of all steps."""'
    yield f"    device, rank, ranks = joined({recipe.cards}{', sharded=True' * recipe.is_sharded})"
    yield "    torch.manual_seed(SEED)"
    yield "    model, optimizer = make(source, device)"
    yield f"    context, scaler = {context}, {scaler}"
    yield "    losses: list[float] = []"
    yield "    sizes = TOKENS, MICRO_BATCH, ACCUMULATION, EPOCHS"
    yield "    for batches in steps_of(texts, source, device, rank, ranks, *sizes):"
    yield "        loss = train_step(model, optimizer, batches, context, scaler)"
    yield "        losses.append(mean_of_ranks(loss, ranks))"
    yield "        report(losses, device, rank, SIMULATED_PEAK_BYTES, LEAST_SPARE_BYTES)"
    yield "        if len(losses) == steps:"
    yield "            break"
    yield "    save(model, source, rank, ranks)"
    yield "    return losses"
    yield ""
    yield ""
    yield 'if __name__ == "__main__":'
    yield '    given = sys.argv[1:] or ["texts.txt"]'
    yield "    try:"
    yield "        main(given[0], *given[1:2], *map(int, given[2:3]))"
    yield "    finally:"
    yield "        if dist.is_initialized():"
    yield "            dist.destroy_process_group()"
