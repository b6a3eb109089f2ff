"""`train.py`: the program of a recipe as a file that needs no course, with the parts that it uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from utils.fitting import sequence_program, train_script_run, training_program
from utils.fitting.cures import PACKED
from utils.fitting.recipe import Recipe
from utils.fitting.verdict import FitVerdict

# Since these versions the course's programs run; the chunked loss is newer.
FLOORS = {
    "torch": "2.11",
    "transformers": "5.0",
    "accelerate": "1.10",
    "peft": "0.18",
    "bitsandbytes": "0.49",
}
CHUNKED_TORCH = "2.13"
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)",
    "adamw-foreach": "torch.optim.AdamW(trained, lr=LEARNING_RATE)",
    "adafactor": "torch.optim.Adafactor(trained, lr=LEARNING_RATE)",
    "sgd": "torch.optim.SGD(trained, lr=LEARNING_RATE)",
    **{
        name: f"bnb.optim.{kind}(trained, lr=LEARNING_RATE)"
        for name, (_, kind, _) in PACKED.items()
    },
}
LEAST_SPARE_SHARE = 0.02  # of the card: what the longest batch and the driver may still take
_HEADER = '''"""Trains {name}: {recipe}.

Simulated on one {card}: tensors take {peak:.2f} GiB at the peak, the allocator {needed:.2f} GiB.
{speed}
The first three steps print what this machine takes beside both. Simulated with torch {torch} and
transformers {transformers}.

{install}
{launch}
{launch} MODEL 3   # another folder or name of the same model; stops after 3 steps

Then {load}
loads what was trained. It saves once, at the end. It shuffles rows. It does not clip gradients, warm
up the learning rate, evaluate, resume, leave the questions of chats out of the loss, or keep texts
that share a row from seeing one another.
"""'''
_FOUR_BITS = """FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=PRODUCTS,
)"""

_LAST = """if __name__ == "__main__":
    given = sys.argv[1:] or ["texts.txt"]
    main(given[0], *given[1:2], *map(int, given[2:3]))"""
_LAST_SHARDED = """if __name__ == "__main__":
    given = sys.argv[1:] or ["texts.txt"]
    try:
        main(given[0], *given[1:2], *map(int, given[2:3]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()"""


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
    surrounding = train_script_run.SHARDED if recipe.is_sharded else train_script_run.ALONE
    parts = [
        *map(_text, _parts(recipe)),
        "\n".join(_make(recipe, auto)),
        *map(_text, surrounding),
        "\n".join(_main(recipe)),
    ]
    top = [*_header(verdict, recipe, source), *_imports("\n".join(parts), recipe, auto)]
    constants = _constants(verdict, recipe, source)
    text = "\n\n\n".join(["\n".join([*top, "", *constants]), *parts])
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
    floors = FLOORS | ({"torch": CHUNKED_TORCH} if recipe.loss == "chunked" else {})
    return " ".join(f'"{name}>={floors[name]}"' for name in names)


def _header(verdict: FitVerdict, recipe: Recipe, source: str) -> Iterator[str]:
    gib = 2**30
    kind = "peft.AutoPeftModelForCausalLM" if recipe.is_frozen else "AutoModelForCausalLM"
    # Without it the frozen weights are loaded in 16 bits.
    packing = ", quantization_config=FOUR_BITS" if recipe.method == "qlora" else ""
    yield _HEADER.format(
        speed=verdict.speed,
        torch=version("torch"),
        transformers=version("transformers"),
        load=f'{kind}.from_pretrained("trained"{packing})',
        name=source,
        recipe=recipe,
        card=verdict.card,
        peak=verdict.peak_bytes / gib,
        needed=verdict.needed_bytes / gib,
        install=f"pip install {requirements(recipe)}",
        launch=launch_line(recipe),
    )


def _imports(body: str, recipe: Recipe, auto: type) -> Iterator[str]:
    """Those that the body uses; the allocator is told of its segments before torch is there."""
    abstract = ("Iterable", "Iterator", "Sequence")
    used = ", ".join(name for name in abstract if re.search(rf"\b{name}\b", body))
    yield from (f"import {name}" for name in ("contextlib", "json", "os", "sys", "time"))
    yield f"from collections.abc import {used}"
    yield from ("from pathlib import Path", "from typing import Any", "")
    yield "# Segments that grow usually leave fewer gaps than those of fixed sizes, which were simulated."
    yield 'os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")'
    yield ""
    if recipe.optimizer in PACKED and not recipe.step_in_backward:
        yield "import bitsandbytes as bnb"
    yield "import torch"
    if recipe.is_sharded:
        yield "import torch.distributed as dist"
    if re.search(r"\bnn\.", body):
        yield "from torch import nn"
    extra = ", BitsAndBytesConfig" if recipe.method == "qlora" else ""
    yield f"from transformers import {auto.__name__}{extra}"


def _constants(verdict: FitVerdict, recipe: Recipe, source: str) -> Iterator[str]:
    seconds = f"{verdict.seconds[1]:.3g}" if verdict.seconds else "None  # no formula is known"
    yield from (
        f"LAUNCH = {launch_line(recipe)!r}",
        f"SOURCE = {source!r}",
        f"TOKENS, MICRO_BATCH, ACCUMULATION = {recipe.tokens}, {recipe.micro_batch}, {recipe.accumulation}",
        "EPOCHS, LEARNING_RATE, SEED = 1, 1e-4, 0",
        f"SIMULATED_PEAK_BYTES = {verdict.peak_bytes:_}",
        f"PREDICTED_STEP_SECONDS = {seconds}",
        f"LEAST_SPARE_BYTES = {int(LEAST_SPARE_SHARE * verdict.usable_bytes):_}  # else it stops after three steps",
    )
    if recipe.method == "qlora":
        kind = "torch.float16" if recipe.products == "fp16" else "torch.bfloat16"
        yield from _FOUR_BITS.replace("PRODUCTS", kind).splitlines()


def _parts(recipe: Recipe) -> Iterator[Callable[..., Any]]:
    if recipe.checkpointing:
        yield training_program.checkpoint_each
    if recipe.is_frozen:
        yield training_program.add_adapters
    if recipe.is_sharded:
        yield training_program.shard
    if recipe.autocast:
        yield training_program.autocast_forward
    if recipe.step_in_backward:
        yield training_program.make_optimizer
        yield training_program.step_in_backward
    if recipe.offload_activations:
        yield training_program.on_the_host
    if recipe.loss == "chunked" and recipe.sequence_cards == 1:
        yield training_program.chunk_loss
    if recipe.sequence_cards > 1:
        yield from _shared_parts(recipe)
    yield training_program.scaled_train_step if _is_scaled(recipe) else training_program.train_step


def _shared_parts(recipe: Recipe) -> Iterator[Callable[..., Any]]:
    yield sequence_program.Exchange
    yield sequence_program.share_heads
    if recipe.loss == "chunked":
        yield sequence_program.chunk_own_loss
    yield sequence_program.share_tokens


def _is_scaled(recipe: Recipe) -> bool:
    return recipe.precision == "fp16-mixed"


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
        yield f"    checkpoint_each(model, every={recipe.checkpointing}{spared})"
    if recipe.loss == "chunked":
        yield f"    {'chunk_own_loss' if recipe.sequence_cards > 1 else 'chunk_loss'}(model)"
    if recipe.sequence_cards > 1:
        yield f"    share_heads(model, {recipe.sequence_cards})"
    if recipe.is_frozen:
        targets = recipe.targets if isinstance(recipe.targets, str) else list(recipe.targets)
        yield f"    model = add_adapters(model, rank={recipe.rank}, targets={targets!r})"
    if recipe.is_sharded:
        gathered = f", {weights[recipe.autocast]}" if recipe.autocast else ""
        yield f"    shard(model{gathered}{', offload=True' * recipe.offload_states})"
    if recipe.sequence_cards > 1:
        yield f"    share_tokens(model, {recipe.sequence_cards})"
    if recipe.autocast:
        yield f"    autocast_forward(model, device.partition(':')[0], {weights[recipe.autocast]})"
    yield "    model.train()"
    if recipe.step_in_backward:
        yield f"    step_in_backward(model, {recipe.optimizer!r}, LEARNING_RATE)"
        yield "    return model, None"
    else:
        yield "    trained = [weight for weight in model.parameters() if weight.requires_grad]"
        yield f"    return model, {OPTIMIZERS[recipe.optimizer]}"


def _main(recipe: Recipe) -> Iterator[str]:
    rank = "rank" if recipe.is_sharded else ""
    yield "def main(texts: str, source: str = SOURCE, steps: int | None = None) -> list[float]:"
    yield '    """Train on a file of text; the losses of all steps."""'
    if rank:
        yield f"    device, rank, ranks = joined(LAUNCH, {recipe.cards})"
    else:
        yield "    check_processes(1, LAUNCH)"
        yield '    device = "cuda:0" if torch.cuda.is_available() else "cpu"'
    yield "    torch.manual_seed(SEED)"
    yield "    model, optimizer = make(source, device)"
    if _is_scaled(recipe):
        yield "    scaler = torch.amp.GradScaler(device.partition(':')[0])"
    yield '    if device != "cpu":'
    yield "        torch.cuda.reset_peak_memory_stats()  # loading has a peak of its own"
    yield "    losses: list[float] = []"
    yield "    sizes = TOKENS, MICRO_BATCH, ACCUMULATION, EPOCHS"
    # Cards that share a text all read it, and take their part of it in forward.
    text = f" // {recipe.sequence_cards}" * (recipe.sequence_cards > 1)
    who = f", rank{text}, ranks{text}" * bool(rank)
    yield f"    for batches in steps_of(texts, source, device, *sizes{who}):"
    yield "        began = time.perf_counter()  # after the texts became tokens"
    yield f"        loss = {_step_call(recipe)}"
    yield f"        losses.append({'mean_of_ranks(loss, ranks)' if rank else 'float(loss)'})"
    yield "        seconds = time.perf_counter() - began"
    yield "        report("
    yield "            losses, device, seconds, SIMULATED_PEAK_BYTES, PREDICTED_STEP_SECONDS,"
    yield f"            LEAST_SPARE_BYTES{', rank' if rank else ''},"
    yield "        )"
    yield "        if len(losses) == steps:"
    yield "            break"
    yield "    save_sharded(model, source, rank)" if rank else "    save(model, source)"
    yield "    return losses"
    yield ""
    yield ""
    yield from (_LAST_SHARDED if rank else _LAST).splitlines()


def _step_call(recipe: Recipe) -> str:
    scaled = _is_scaled(recipe)
    name, more = ("scaled_train_step", ", scaler") if scaled else ("train_step", "")
    context = ", on_the_host" if recipe.offload_activations else ""
    return f"{name}(model, optimizer, batches{more}{context})"
