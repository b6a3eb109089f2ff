"""Runs the lines that a lesson's last cell gives its reader, as the reader would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # the library takes seconds to import
    from transformers import LlamaForCausalLM


def run_block(text: str, **names: Any) -> dict[str, Any]:
    """Run lines of a page among the names that their reader has; all names after it.

    Args:
        text: the block, as it stands in the page.
        names: what the reader's own program has made before: `model`, `optimizer`, `batch`.

    Raises:
        What the lines raise.
    """
    found = dict(names)
    exec(compile(text, "On Monday", "exec"), found)
    del found["__builtins__"]
    return found


def small_llama(**sizes: Any) -> LlamaForCausalLM:
    """A Llama of the transformers library, drawn from seed 0: what a reader's model stands for.

    Args:
        sizes: of its configuration, as `LlamaConfig` names them: `num_hidden_layers=6`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    changed: dict[str, Any] = small | sizes
    return LlamaForCausalLM(LlamaConfig(**changed))
