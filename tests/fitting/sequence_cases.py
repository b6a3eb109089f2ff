"""Training steps whose texts several ranks share, beside those of one process that has them whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers as hf

from utils.fitting import Recipe, recipe_step, sequence_program, training_program
from utils.fitting.inputs import micro_batch
from utils.fitting.recipe_step import DTYPES
from utils.memory import measure
from utils.memory.source import CountingSource

ROWS, LENGTH, STEPS = 2, 32, 3
RATES = {"fp32": 1e-2, "bf16-mixed": 1e-4}
Fault = Callable[[dict[str, Any]], dict[str, Any]]
Case = tuple[Any, Recipe, Fault | None]
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 48}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": _EXPERTS,
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_neox": {"rotary_pct": 0.5},
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> Any:
    """A small configuration of a kind of model."""
    return hf.AutoConfig.for_model(kind, **_SIZES | CONFIGS[kind] | changes)


def batches(texts: int) -> list[dict[str, torch.Tensor]]:
    """Of each step: `texts` times `ROWS` rows of tokens, of which some labels are left out."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(1, 96, (texts * ROWS, LENGTH))
        labels = tokens.clone()
        labels[:, : LENGTH // 8] = -100  # as a question's are
        found.append({"input_ids": tokens, "labels": labels})
    return found


def made(config: Any, recipe: Recipe, fault: Fault | None = None) -> tuple[Any, Any]:
    """Model and optimizer, of the parts that the script has."""
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # the model writes its kind of attention there
    model: Any = hf.AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    model = model.to(DTYPES[recipe.weights])
    shares, cards = recipe.sequence_cards > 1, recipe.sequence_cards
    if recipe.checkpointing:
        training_program.checkpoint_each(model, recipe.checkpointing)
    if recipe.loss == "chunked":
        (sequence_program.chunk_own_loss if shares else training_program.chunk_loss)(model)
    if shares:
        sequence_program.share_heads(model, cards)
    if recipe.is_frozen:
        torch.manual_seed(2)
        model = training_program.add_adapters(model, recipe.rank, recipe.targets)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zeros give the others no gradient
                torch.nn.init.normal_(weight, std=0.1)
    gathered = DTYPES[recipe.autocast] if recipe.autocast else None
    if recipe.cards > 1:
        training_program.shard(model, gathered, recipe.offload_states)
    if fault:
        forward = model.forward
        model.forward = lambda **given: forward(**fault(given))
    if shares:
        sequence_program.share_tokens(model, cards)
    if gathered:
        training_program.autocast_forward(model, "cpu", gathered)
    return model.train(), training_program.make_optimizer(
        recipe.optimizer, model.parameters(), RATES[recipe.precision]
    )


def trained(
    config: Any, recipe: Recipe, texts: int, index: int = 0, fault: Fault | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the gradients of the first, of the text `index` out of several."""
    model, optimizer = made(config, recipe, fault)
    losses, gradients = [], {}
    for whole in batches(texts):
        rows = slice(index * ROWS, (index + 1) * ROWS) if recipe.cards > 1 else slice(None)
        loss = model(**{name: value[rows] for name, value in whole.items()}).loss
        loss.backward()
        gradients = gradients or {
            name: getattr(weight.grad, "full_tensor", weight.grad.clone)()
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if recipe.cards > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / recipe.cards)
    return losses, gradients


class Apart(NamedTuple):
    """How far ranks are from one process.

    Attributes:
        loss: The largest difference of a step's loss.
        gradient: The largest of a gradient of the first step, over the largest gradient.
    """

    loss: float
    gradient: float


def apart(cases: Mapping[str, Case]) -> dict[str, Apart]:
    """Each case on all ranks, and on each of them alone.

    In bf16 it is set beside FSDP2 with the whole text on each rank, which rounds weights as the case
    does. FSDP2 by itself, without a shared text, is 2.6e-4 from autocast over fp32 weights here.
    """
    found = {}
    for name, (config, recipe, fault) in cases.items():
        index = dist.get_rank() // recipe.sequence_cards
        ours, gradients = trained(config, recipe, recipe.texts_at_once, index, fault)
        whole = {"sequence_cards": 1, "offload_states": False}
        alone = recipe.but(**whole, cards=recipe.cards if recipe.autocast else 1)
        theirs, wanted = trained(config, alone, recipe.texts_at_once)
        assert gradients.keys() == wanted.keys()
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        gap = max(float((gradients[key] - wanted[key]).abs().max()) for key in wanted)
        losses = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        found[name] = Apart(losses, gap / largest)
    return found


def run_step(config: Any, recipe: Recipe) -> Callable[[Any, Any], None]:
    """The step that is metered on ranks and simulated, on a CPU."""
    batch = functools.partial(micro_batch, config, recipe, "cpu")
    return lambda model, optimizer: recipe_step.step(model, optimizer, batch(), recipe)


def metered(recipes: Mapping[str, Recipe], config: Any) -> dict[str, int]:
    """Peak bytes of this rank, of the model as the simulation builds it."""
    torch.set_num_threads(1)
    found = {}
    for name, recipe in recipes.items():
        model, optimizer = recipe_step.build(hf.AutoModelForCausalLM, config, recipe)
        step = functools.partial(run_step(config, recipe), model, optimizer)
        found[name] = measure(
            step, model=model, optimizer=optimizer, timed_steps=0, source=CountingSource()
        ).peak_bytes
    return found


def on_a_rank(
    cases: Mapping[str, Case], recipes: Mapping[str, Recipe], config: Any
) -> tuple[dict[str, Apart], dict[str, int]]:
    """Both in one start of the ranks."""
    return apart(cases), metered(recipes, config)
