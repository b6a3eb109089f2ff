"""Configurations that tests write, and how many parameters a configuration makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from utils.fitting.model_configs import auto_class

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def written(folder: Path, **keys: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def count(config: Any) -> int:
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
