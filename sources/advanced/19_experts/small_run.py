"""Runs the script of lesson 19's last cell as it stands, on ranks of this machine, with a small model of the same kind."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.lessons.blocks import run_block
from utils.ranks import run_ranks

EXPERTS = 8


def script() -> str:
    """The first block of code of the page's last cell."""
    page = Path(__file__).with_name("lesson.py").read_text(encoding="utf-8")
    last = re.sub(r"^# ?", "", page.partition("# ## On Monday\n")[2], flags=re.MULTILINE)
    return last.partition("```python\n")[2].partition("```")[0]


def printed_by_script(ranks: int, ep_size: int, steps: int) -> str:
    """What rank 0 prints in so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_small_mixture, 1, folder)
        return run_ranks(_run, ranks, script(), folder, ep_size, steps)[0]


def save_small_mixture(folder: str) -> None:
    """A Qwen3-MoE of two layers with 8 experts, 2 for a token, and random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    kind: Any = Qwen3MoeConfig
    shape = kind(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        Qwen3MoeForCausalLM(shape).save_pretrained(folder)


def batch(rank: int, step: int = 0) -> Tensor:
    """Two sequences of a rank and step."""
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(rank + 4 * step))


def _run(text: str, name: str, ep_size: int, steps: int) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = [batch(rank, step) for step in range(steps)]
    logging.disable(logging.WARNING)  # this rank's process ends with the call
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        run_block(
            text,
            name=name,
            world_size=ranks,
            ep_size=ep_size,
            batches=batches,
            folder=f"{name}/trained",
        )
    return said.getvalue().rstrip()
