"""The last cell's blocks: ranks that shard as their reader's would, beside one process."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from utils.lessons.blocks import run_block
from utils.models import Transformer, TransformerConfig
from utils.ranks import run_ranks
from utils.techniques.deepspeed import load_deepspeed

SMALL = TransformerConfig(vocabulary=64, hidden=32, layers=2, heads=2, feedforward=64)
RANKS, ROWS, STEPS = 2, 16, 4
SECONDS = 200.0
BF16 = '"out", bf16=True'


def block_1(text: str) -> None:
    """FSDP2: each rank holds half of the weights and moments, the losses are one process's, and it saves."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_sharded, RANKS, text, folder)
        assert (Path(folder) / "out/last/.metadata").is_file(), "nothing was saved in out/last"
    whole = 3 * sum(p.numel() for p in Transformer(SMALL).parameters())
    for rank, (_, numbers) in enumerate(found):
        assert numbers <= 0.51 * whole, f"rank {rank} holds {numbers:,} of {whole:,} numbers"
    mean = [sum(each) / RANKS for each in zip(*(losses for losses, _ in found), strict=True)]
    torch.testing.assert_close(mean, _alone(), rtol=5e-3, atol=0, msg=f"{mean}, alone {_alone()}")


def block_2(text: str) -> None:
    """Trainer by DeepSpeed: the optimizer's moments are divided, the weights are the same."""
    found = run_ranks(_by_trainer, RANKS, text, timeout_seconds=SECONDS)
    engine, count, moments, weights = found[0]
    assert engine == "DeepSpeedEngine", f"{engine} trained, and not DeepSpeed"
    assert moments <= 0.55 * 2 * count, f"a rank holds {moments:,} numbers of {2 * count:,} moments"
    assert torch.equal(weights, found[1][3]), "the ranks hold different weights"


def _tokens() -> Tensor:
    return torch.arange(ROWS * 17).reshape(ROWS, 17) % 61


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    loss = _loss(model(tokens[:, :-1]), tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL)


def _alone() -> list[float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return [_step(model, optimizer, _tokens()) for _ in range(STEPS)]


def _sharded(text: str, folder: str) -> tuple[list[float], int]:
    """Losses, and the numbers that this rank holds in weights and moments."""
    model, losses = _model(), []
    mine = _tokens().chunk(RANKS)[dist.get_rank()].to(next(model.parameters()).device)
    model.register_forward_hook(lambda *given: losses.append(_loss(given[2], mine).item()))
    with contextlib.chdir(folder):
        names = run_block(text, model=model, batches=[(mine[:, :-1], mine[:, 1:])] * STEPS)
    moments = [v for state in names["optimizer"].state.values() for v in state.values()]
    held = [*names["model"].parameters(), *moments]
    return losses, sum(t.to_local().numel() for t in held if isinstance(t, DTensor))


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": _tokens()[index], "labels": _tokens()[index]}


def _by_trainer(text: str) -> tuple[str, int, int, Tensor]:
    """The engine's name, its parameters, the moments' numbers on this rank, and the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    load_deepspeed()
    dist.destroy_process_group()  # the reader's script begins without one
    if not torch.cuda.is_available():  # transformers takes bfloat16 on a CPU only when told
        assert text.count(BF16) == 1, f"the block has no {BF16!r} to be told beside"
        text = text.replace(BF16, f"{BF16}, use_cpu=True")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        trainer = run_block(text, model=model, dataset=_Rows())["trainer"]
    engine = trainer.model_wrapped
    states = engine.optimizer.state.values()
    moments = sum(
        v.numel() for state in states for name, v in state.items() if name.startswith("exp_avg")
    )
    weights = torch.cat([p.detach().float().flatten() for p in engine.parameters()])
    return type(engine).__name__, len(weights), moments, weights
