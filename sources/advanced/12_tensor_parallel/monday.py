"""Runs the lines of lesson 12's last cell, on two ranks, and asserts what the page promises of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.models import Transformer, TransformerConfig
from utils.models.transformer import attend
from utils.ranks import run_ranks

RANKS, WORDS, BLOCKS = 2, 64, 2
NEAR = 1e-9  # fp64
LEARNING_RATE = 1e-3
BACKWARD = "        loss.backward()\n"
FAULT = "        model.norm.weight.grad.to_local().mul_(1 - 2 * mesh['tp'].get_local_rank())\n"  # ranks disagree
QK_NORM = '# **dict.fromkeys(["attention.query_norm"'


def block_1(text: str) -> None:
    """The script: loss and weights of one process, saved and loaded; a rank's part; no send too many."""
    for ranks in (RANKS, 2 * RANKS):  # tensor parallelism alone; and FSDP over two of its groups
        with tempfile.TemporaryDirectory() as folder:
            reports = run_ranks(_by_plan, ranks, text, folder, RANKS, timeout_seconds=300)
            saved = {path.name for path in Path(folder).iterdir()}
        assert saved == {"last"}, f"saved are {saved}"
        for report in reports:
            _assert_right(report, ranks)
            assert report.drift == ["drifted apart: {}"], f"right gradients drift: {report.drift}"
    assert BACKWARD in text, "the loop has another backward"
    with tempfile.TemporaryDirectory() as folder:
        planted = text.replace(BACKWARD, BACKWARD + FAULT)
        for report in run_ranks(_by_plan, RANKS, planted, folder, RANKS, timeout_seconds=300):
            assert all("'norm.weight'" in line for line in report.drift), report.drift
    assert QK_NORM in text, "the plan says no more what norms of queries and keys need"
    with tempfile.TemporaryDirectory() as folder:
        uncommented = text.replace(QK_NORM, QK_NORM.removeprefix("# "))
        for report in run_ranks(_by_plan, RANKS, uncommented, folder, RANKS, timeout_seconds=300):
            _assert_right(report, RANKS, qk_norm=True)


def _assert_right(report: Any, ranks: int, *, qk_norm: bool = False) -> None:
    assert report.loss_gap < NEAR, "the split model computes another loss"
    assert report.norm_gap < NEAR, "the norm to clip by is not the whole model's"
    assert report.weight_gap < NEAR, "its step leads to other weights"
    assert report.held < 1.02 * report.whole / ranks, (
        "a rank holds more than its part of the matrices"
    )
    calls: dict[str, int] = {}
    for operation, count in report.calls.items():
        calls[operation.rpartition(".")[2]] = calls.get(operation.rpartition(".")[2], 0) + count
    # Four of each a block, one of each for the head. The embedding's two all-to-alls are gathers where
    # ranks are processes of a CPU: gloo has none.
    assert calls["reduce_scatter_tensor"] == 4 * BLOCKS + 1, f"more sums than planned: {calls}"
    moved = sum(calls.get(name, 0) for name in ("all_to_all_single", "shard_dim_alltoall"))
    gathers = calls["all_gather_into_tensor"] + moved
    assert gathers == 4 * BLOCKS + 1 + 2, f"more gathers: {calls}"
    norms = (4 if qk_norm else 2) * BLOCKS + 1
    assert calls["all_reduce"] == 3 + norms, f"the loss needs three, each norm one: {calls}"


def block_2(text: str) -> None:
    """transformers' plan: one process's loss, from bf16 files; about half of the parameters on a rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_save_small_llama, 1, folder)
        wanted, held_whole, *_ = run_ranks(_by_transformers, 1, text, folder)[0]
        for loss, held, plan, dtypes in run_ranks(_by_transformers, RANKS, text, folder):
            assert abs(loss / wanted - 1) < 1e-5, "two ranks compute another loss than one"
            assert held < 0.6 * held_whole, f"a rank holds {held:,} of {held_whole:,} parameters"
            assert dtypes == {torch.float32}, f"small steps are lost in weights of {dtypes}"
            assert plan["model.embed_tokens"] == "embedding_rowwise", "the embedding is whole"
            assert plan["lm_head"] == "colwise_gather_output", "logits are not gathered any more"


def _by_plan(text: str, folder: str, tp: int) -> Any:
    """A rank's report: two tensor-parallel ranks of one sequence each, and FSDP over the rest."""
    shape = TransformerConfig(
        vocabulary=WORDS, hidden=32, layers=BLOCKS, heads=4, kv_heads=4, feedforward=96
    )
    torch.manual_seed(0)
    make_model = functools.partial(_model, shape, qk_norm=QK_NORM not in text)
    alone = make_model()
    alone.init_weights(std=0.1)
    weights = copy.deepcopy(alone.state_dict()) if dist.get_rank() == 0 else {}
    sequences = dist.get_world_size() // tp
    inputs, targets = torch.randint(WORDS, (2, sequences, 16)).unbind()
    loss, norm = _step_alone(alone, inputs, targets)
    sizes = {"n_kv_heads": 4, "n_channels": 96, "n_vocabulary": WORDS, "n_tokens": 16}
    printed = io.StringIO()
    run = functools.partial(
        run_block,
        text,
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
        tp=tp,
        dtype=torch.float64,
        reduce_dtype=torch.float64,
        learning_rate=LEARNING_RATE,
        make_buffers=lambda model: None,
        make_model=make_model,
        spread=_spread,
        weights=weights,
        batches=lambda place: [(inputs[place : place + 1], targets[place : place + 1])],
        folder=folder,
        **sizes,
    )
    with contextlib.redirect_stdout(printed):
        made = run()
    model, total = made["model"], made["loss"].full_tensor()
    dist.all_reduce(total)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return SimpleNamespace(
        loss_gap=abs(total.item() / dist.get_world_size() / loss - 1),
        norm_gap=abs(made["norm"].full_tensor().item() / norm - 1),
        weight_gap=max(((a.full_tensor() - b).norm() / b.norm()).item() for a, b in pairs),
        held=sum(p.to_local().numel() for p in model.parameters() if p.dim() > 1),
        whole=sum(p.numel() for p in model.parameters() if p.dim() > 1),
        drift=[line for line in printed.getvalue().splitlines() if line.startswith("drifted")],
        calls={str(operation): n for operation, n in made["sent"].get_comm_counts().items()},
    )


def _model(shape: TransformerConfig, *, qk_norm: bool) -> Any:
    """Where asked, with a norm of each head's queries and one of its keys, as Qwen3 has them."""
    model: Any = Transformer(shape)
    for block in model.blocks if qk_norm else ():
        block.attention.query_norm = nn.RMSNorm(shape.head_dim)
        block.attention.key_norm = nn.RMSNorm(shape.head_dim)
        block.attention.attend = functools.partial(_attend_to_normed, block.attention)
    return model.double()


def _attend_to_normed(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # Norms see (batch, sequence, heads, channels), as the page says.
    query = attention.query_norm(query.transpose(1, 2)).transpose(1, 2)
    key = attention.key_norm(key.transpose(1, 2)).transpose(1, 2)
    return attend(query, key, value)


def _spread(tensor: Tensor, group: Any = None) -> float:
    """The page's own `spread`: 0 where the ranks hold the same."""
    top, low = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group)
    return (top - low).max().item()


def _step_alone(model: Any, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Loss, and norm of all gradients before they are clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


def _save_small_llama(folder: str) -> None:
    model: Any = small_llama(vocab_size=WORDS, num_hidden_layers=BLOCKS, num_key_value_heads=4)
    model.to(torch.bfloat16).save_pretrained(folder)


def _by_transformers(text: str, folder: str) -> tuple[float, int, dict[str, str], set[torch.dtype]]:
    torch.manual_seed(0)
    batch = torch.randint(WORDS, (2, 32))
    made = run_block(text, name=folder, batch=batch)
    model = made["model"]
    return made["loss"].item(), made["held"], model.tp_plan, {p.dtype for p in model.parameters()}
