"""Published peaks of fine-tunes by transformers and peft, beside what `utils.fitting` says of the same recipe.

PEFT's comparison runs its own loop in bf16 (method_comparison/MetaMathQA/run.py): its reserved maximum.
Qwen's table is of Trainer with adapters of rank 64 and checkpointing; it calls its memory G, and does
not say of which kind, so it is held against what a device shows: reserved bytes and the context.
Qwen's first models are of a class of their own, which a Llama of their sizes stands for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import transformers

from evidence.validation.comparison import Comparison
from evidence.validation.eager import QWEN
from evidence.validation.simulation_published import LLAMA_32_3B, LLAMA_PARAMETERS, PEFT_DEVICE
from evidence.validation.tables import table, whole
from utils.catalog import device
from utils.fitting import Recipe
from utils.fitting.recipe_simulation import simulated_step
from utils.memory import Measurement
from utils.units import GB

PEFT_TARGETS = ("q_proj", "v_proj")
# c_attn, attn.c_proj, w1 and w2 of Qwen's finetune.py, in a Llama's words.
QWEN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
QWEN_DEVICE = "A100 80GB"


def comparisons() -> list[Comparison]:
    """All rows that the recipes can say: GB."""
    return [*peft_rows(), *qwen_rows()]


def peft_rows() -> Iterator[Comparison]:
    """PEFT's LoRA rows with plain AdamW."""
    for row in table("peft_adapters"):
        if row["peft_type"] != "LORA" or row["optimizer"] != "AdamW" or "dora" in row["experiment"]:
            continue
        if "lorafa" in row["experiment"]:
            continue
        recipe = Recipe(
            method="lora",
            rank=whole(row["r"]),
            targets=PEFT_TARGETS,
            precision="bf16",
            optimizer="adamw-foreach",
            tokens=whole(row["max_seq_len"]),
            micro_batch=whole(row["batch_size"]),
        )
        found = _step(LLAMA_32_3B, recipe, PEFT_DEVICE)
        published, simulated = float(row["memory_max_bytes"]) / GB, _reserved_bytes(found) / GB
        yield Comparison(
            "fit: PEFT LoRA",
            "reserved GB, maximum",
            row["experiment"],
            published,
            simulated,
            LLAMA_PARAMETERS,
        )


def qwen_rows(sizes: Container[str] = tuple(QWEN)) -> Iterator[Comparison]:
    """Qwen's LoRA table: eight micro-batches a step, of which the second is like those that follow."""
    for row in table("qwen_finetunes"):
        if row["size"] not in sizes:
            continue
        shape = QWEN[row["size"]]
        config = {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feedforward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "max_position_embeddings": 8192,
        }
        recipe = Recipe(
            method="lora",
            rank=64,
            targets=QWEN_TARGETS,
            optimizer="adamw-foreach",
            tokens=whole(row["seq_len"]),
            accumulation=2,
            checkpointing=1,
        )
        found = _step(config, recipe, QWEN_DEVICE)
        shown = (_reserved_bytes(found) + device(QWEN_DEVICE).context_bytes) / GB
        case = f"{row['size']} s{row['seq_len']}"
        yield Comparison(
            "fit: Qwen LoRA",
            "device GB",
            case,
            float(row["memory_g"]),
            shown,
            shape.parameter_count,
        )


def _step(config: dict[str, Any], recipe: Recipe, device: str) -> Measurement:
    llama = transformers.LlamaConfig(**config)
    return simulated_step(transformers.AutoModelForCausalLM, llama, recipe, device)


def _reserved_bytes(found: Measurement) -> int:
    assert found.reserved_bytes is not None, "a GPU's simulation says what is reserved"
    return found.reserved_bytes
