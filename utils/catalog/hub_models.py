"""Models by their names on the Hub: the `config.json` of some ship with the course.

A shipped file is the Hub's without tokens and settings of generation, and with two keys of our own:
`_source` says where it and its count were read, `_parameters` is that count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.catalog.lookup import plain
from utils.catalog.shapes import ModelShape

SHIPPED = Path(__file__).with_name("configs")
# Kinds of transformers' models whose blocks are a Llama's, but for what `ModelShape` says of them.
LLAMAS = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "mixtral", "qwen3_moe", "phi3",
)  # fmt: skip


def hub_names() -> list[str]:
    """Names on the Hub of the shipped configurations, sorted."""
    names = (file.stem.replace("--", "/", 1) for file in SHIPPED.glob("*.json"))
    return sorted(names, key=str.lower)


def hub_name(name: str) -> str | None:
    """The shipped name that is meant, in any case, with or without its organisation; None for none."""
    for full in hub_names():
        if plain(name) in (plain(full), plain(full.partition("/")[2])):
            return full
    return None


def config_file(full_name: str) -> Path:
    """The file of a name that `hub_name` gave."""
    return SHIPPED / f"{full_name.replace('/', '--')}.json"


def hub_shape(name: str) -> ModelShape | None:
    """The shape of a shipped model; None where none has that name, or it is no relative of Llama."""
    full = hub_name(name)
    if full is None:
        return None
    return shape_of_config(json.loads(config_file(full).read_text(encoding="utf-8")), full)


def shape_of_config(config: Mapping[str, Any], name: str = "") -> ModelShape | None:
    """The planner's shape of a Llama or one of its relatives; None for another architecture.

    `config`: a whole `config.json`, or what transformers' `to_dict()` gives. `name`: by default its
    own.
    """
    kind = config["model_type"]
    if kind not in LLAMAS:
        return None
    experts = config.get("num_local_experts") or config.get("num_experts")
    return ModelShape(
        name=name or config.get("_name_or_path") or kind,
        family="llama",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_width=config.get("head_dim"),
        feedforward=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        max_sequence=config["max_position_embeddings"],
        tied=config["tie_word_embeddings"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else None,
        expert_feedforward=config.get("moe_intermediate_size") if experts else None,
        published_count=config.get("_parameters"),
        source=config.get("_source", ""),
    )
