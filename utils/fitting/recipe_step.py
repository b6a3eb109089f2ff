"""The model and the step of a recipe, on tensors without data, at any depth."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from utils.fitting import sequence_program, training_program
from utils.fitting.recipe import Recipe
from utils.fitting.sequence_rules import check_sequence_cards
from utils.shims.transformers import never_packed
from utils.techniques.bitsandbytes_import import bitsandbytes_library

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEARNING_RATE = 1e-4
BEHIND_PREFETCH = 4  # layers: FSDP2 gathers ahead, so that the steps of fewer are no repetitions
POSITIONS = ("position_embeddings", "wpe", "embed_positions")  # BERT's, GPT-2's, OPT's
SHARED_BIAS = (
    "relative_attention_num_buckets"  # T5's: its first block computes it for all the others
)
# Whisper's stacks and BART's; the first name is there too, and stands for one of the others.
ENCODER_DECODER = ("num_hidden_layers", "encoder_layers", "decoder_layers")
# Whose tokens transformers reads one after another where the fused kernels (mamba_ssm, rwkv) are missing.
TOKEN_LOOPS = ("mamba", "falcon_mamba", "jamba", "zamba", "rwkv")
LONGEST_LOOP = 512  # tokens: some 40 s of simulation, as much again with each further 512
HEADS = ("lm_head", "score", "classifier")  # what transformers leaves out when it packs


@dataclass(frozen=True)
class Depths:
    """Three depths that are simulated, and that of the model; `small` is None to run it whole."""

    layers: int
    small: tuple[int, int, int] | None


def depths(config: PreTrainedConfig, recipe: Recipe) -> Depths:
    """The depths from which a model's step can be extended: whole repetitions of its pattern apart.

    The first lies behind what is special in the first layers: DeepSeek's are dense, and FSDP2 gathers
    the weights of the first two at other moments than those of the rest. Where three
    shallow models together are no smaller than the model itself, it is run whole.

    Args:
        config: The model's.
        recipe: Which of its blocks are recomputed.
    """
    stacks = _stacks(config)
    layers = max(stacks.values(), default=0)
    is_one = config.get_text_config() is config and not hasattr(config, SHARED_BIAS)
    if not is_one or not layers or min(stacks.values()) < layers:
        return Depths(layers, None)
    kinds = _period(list(getattr(config, "layer_types", None) or []))
    period = lcm(kinds, recipe.checkpointing or 1, recipe.spared or 1)
    first = BEHIND_PREFETCH if recipe.is_sharded else 1
    first += int(getattr(config, "first_k_dense_replace", 0) or 0)
    first += (layers - first) % period
    small = (first, first + period, first + 2 * period)
    return Depths(layers, small if sum(small) < layers else None)


def _stacks(config: PreTrainedConfig) -> dict[str, int]:
    """How many layers each stack has, by the name that the configuration gives it."""
    is_pair = getattr(config, "is_encoder_decoder", False)
    names = ENCODER_DECODER if is_pair else ("num_hidden_layers",)
    found = {name: getattr(config, name, None) for name in names}
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _period(kinds: list[str]) -> int:
    """After how many layers the kinds repeat: 1 where all are alike, 6 in Gemma 3."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return length
    return max(1, len(kinds))


def shallower(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same architecture with fewer layers, in encoder and decoder alike where it has both."""
    small = copy.deepcopy(config)
    for name in _stacks(config):
        setattr(small, name, layers)
    if kinds := vars(small).get("layer_types"):
        small.layer_types = kinds[:layers]  # type: ignore[attr-defined]
    return small


def build(auto: type, config: PreTrainedConfig, recipe: Recipe) -> tuple[nn.Module, Any]:
    """Model and optimizer on `cuda`, as the script makes them, without weights being read.

    Args:
        auto: The Auto class of the model.
        config: What it is made of.
        recipe: How it is trained.

    Raises:
        ValueError: this PyTorch has no chunked loss, a text is longer than the model's positions or
            than a loop over its tokens can be simulated, or cards cannot share it.
    """
    check_sequence_cards(config, recipe)
    _check_token_loop(config, recipe.tokens)
    if shared := recipe.sequence_cards > 1:
        config = copy.deepcopy(config)  # the model writes its kind of attention there
    model: Any = auto.from_config(config, dtype=DTYPES[recipe.weights])  # type: ignore[attr-defined]
    model.config.use_cache = False
    _check_positions(model, auto.__name__, recipe.tokens)
    if recipe.method == "qlora":
        pack(model, DTYPES[recipe.products])
    if not recipe.is_sharded:  # FSDP2 moves blocks itself, and calls a simulated card by its mesh
        model = model.to("cuda")
    if recipe.checkpointing:
        training_program.checkpoint_each(model, recipe.checkpointing, recipe.spared)
    if recipe.loss == "chunked":
        _check_has_chunked_loss()
        (sequence_program.chunk_own_loss if shared else training_program.chunk_loss)(model)
    if shared:
        sequence_program.share_heads(model, recipe.sequence_cards)
    if recipe.is_frozen:
        model = training_program.add_adapters(model, recipe.rank, recipe.targets)
    if recipe.is_sharded:
        gathered = DTYPES[recipe.autocast] if recipe.autocast else None
        training_program.shard(model, gathered, recipe.offload_states)
    if shared:
        sequence_program.share_tokens(model, recipe.sequence_cards)
    if recipe.autocast:
        training_program.autocast_forward(model, "cuda", DTYPES[recipe.autocast])
    model.train()
    if recipe.precision == "fp16-mixed":
        model.course_scaler = torch.amp.GradScaler()
    return model, _optimizer(model, recipe)


def _check_token_loop(config: PreTrainedConfig, tokens: int) -> None:
    """Refuse a text whose tokens the model reads one after another for minutes."""
    if config.model_type in TOKEN_LOOPS and tokens > LONGEST_LOOP:
        raise ValueError(
            f"{config.model_type} reads its tokens one after another where its fused kernels are not "
            f"installed, and simulating {tokens:,} of them takes minutes. Choose tokens={LONGEST_LOOP} or "
            "fewer; with those kernels a step keeps other bytes."
        )


def _check_positions(model: nn.Module, auto: str, tokens: int) -> None:
    """Refuse a text that is longer than the table of positions which the model has learned."""
    if not auto.endswith(("ForCausalLM", "ForMaskedLM")):
        return
    for name, table in model.named_modules():
        if not isinstance(table, nn.Embedding) or name.rpartition(".")[2] not in POSITIONS:
            continue
        if table.num_embeddings < tokens:
            raise ValueError(
                f"This model has learned {table.num_embeddings:,} positions ({name}), and a text of "
                f"{tokens:,} tokens has more. Choose tokens={table.num_embeddings} or fewer."
            )


def _check_has_chunked_loss() -> None:
    if not hasattr(nn.functional, "linear_cross_entropy"):
        raise ValueError(
            f"loss='chunked' takes torch.nn.functional.linear_cross_entropy, which PyTorch has from 2.13 "
            f"on; this is {torch.__version__}. Install a later one, or choose loss='whole'."
        )


def _optimizer(model: Any, recipe: Recipe) -> Any:
    if recipe.step_in_backward:
        return training_program.step_in_backward(model, recipe.optimizer, LEARNING_RATE)
    return training_program.make_optimizer(recipe.optimizer, model.parameters(), LEARNING_RATE)


def pack(model: nn.Module, products: torch.dtype = torch.bfloat16) -> None:
    """Linear layers but the head as bitsandbytes' Linear4bit, in place, packed when they move to a GPU.

    What `from_pretrained(quantization_config=...)` makes of them; tests hold the two together.
    `products` is the type that they compute in.
    """
    bnb: Any = bitsandbytes_library()
    kept = never_packed(model)
    for path, layer in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if type(layer) is not nn.Linear or name in (*HEADS, *kept):
            continue
        packed = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None,
            compute_dtype=products, quant_type="nf4", compress_statistics=True, device="meta",
        )  # fmt: skip
        packed.weight = bnb.nn.Params4bit(
            layer.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            module=packed,
        )
        packed.bias = layer.bias
        setattr(model.get_submodule(owner), name, packed)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor], recipe: Recipe) -> None:
    """One optimizer step of `accumulation` micro-batches, as the script runs it."""
    stepped = None if recipe.step_in_backward else optimizer
    batches = [batch] * recipe.accumulation
    context = training_program.on_the_host if recipe.offload_activations else contextlib.nullcontext
    scaler = getattr(model, "course_scaler", None)
    if scaler is None:
        training_program.train_step(model, stepped, batches, context)
    else:
        training_program.scaled_train_step(model, stepped, batches, scaler, context)
