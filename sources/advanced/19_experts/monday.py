"""Runs the blocks of lesson 19's last cell, on ranks, and asserts what the page promises of them."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.lessons.blocks import run_block
from utils.ranks import RankError, run_ranks

from .small_run import EXPERTS, batch, save_small_mixture


def block_1(text: str) -> None:
    """transformers: one process's loss and norm, ten steps' parameters, a quarter held, a load, and what reloads equal."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_small_mixture, 1, folder)
        wanted = run_ranks(_alone, 1, folder)[0]
        for ep_size in (1, 2, 4):  # 1 is FSDP alone
            found = run_ranks(_by_transformers, 4, text, folder, ep_size, timeout_seconds=300.0)
            loss = sum(report.loss for report in found) / 4
            assert abs(loss / wanted.loss - 1) < 2e-3, f"four ranks: {loss}, one: {wanted.loss}"
            for report in found:
                assert abs(report.norm / wanted.norm - 1) < 0.05, "the norm is not of all gradients"
                assert report.held < 0.26 * wanted.held, f"a rank holds {report.held:,} parameters"
                assert 1 <= report.load <= ep_size, (
                    "a load is the busiest rank's rows over the mean of its group"
                )
                assert report.rows == 4 * 2 * 17 * 2 * 2, (
                    "ranks, tokens, k, layers: a row is missing"
                )
                assert report.reloads, "the saved model or optimizer is another"
        # In groups of two, experts have replicas as well.
        gaps = run_ranks(_ten_steps, 4, text, folder, 2, timeout_seconds=300.0)
        assert max(gaps) < 1e-4, f"ten steps of SGD in fp32 are {max(gaps):.0e} from one process"
        own = _put(text, "(total / total.sum(1,", "(rows / rows.sum(1,")
        gaps = run_ranks(_ten_steps, 4, own, folder, 2, timeout_seconds=300.0)
        assert max(gaps) > 1e-3, "balance of a rank's own tokens passes for that of the whole batch"
        line = "out = model(input_ids=batch, labels=batch, output_router_logits=True)\n"
        flat = "    out.router_logits = tuple(r.softmax(-1) for r in out.router_logits)\n"
        try:
            run_ranks(
                _ten_steps, 4, _put(text, line, line + flat), folder, 2, timeout_seconds=300.0
            )
        except RankError as error:
            assert "these are probabilities" in str(error), error
        else:
            raise AssertionError("probabilities under the name of logits pass")


def _put(text: str, told: str, said: str) -> str:
    assert text.count(told) == 1, f"the page's lines no longer say {told!r} once"
    return text.replace(told, said)


def block_2(text: str) -> None:
    """Of a profiler's trace: seconds in which a kernel of NCCL runs and no other does."""
    kernels = [
        ("ncclDevKernel_AllGather", 0.0, 3e6),  # alone until 1 s, and from 2 s to 3 s
        ("matmul", 1e6, 1e6),
        ("matmul", 4e6, 2e6),
        ("ncclDevKernel_ReduceScatter", 4.5e6, 1e6),  # overlapped in full
        ("ncclDevKernel_AllGather", 6e6, 5e5),  # two at once are counted once
        ("ncclDevKernel_ReduceScatter", 6e6, 5e5),
    ]
    events: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": long}
        for name, start, long in kernels
    ]
    events += [
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_gather", "ts": 7e6, "dur": 1e6},
        {"ph": "M", "name": "process_name"},
    ]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        trace.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found = run_block(text, trace=str(trace))
    assert abs(found["gap"] / 1e6 - 2.5) < 1e-9, f"{found['gap']} microseconds, not 2.5 seconds"
    assert "2.50 s" in said.getvalue()


def _alone(folder: str) -> SimpleNamespace:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    with torch.no_grad():
        pooled = _mean_loss(model, 0, 0.0)
        model.config.router_aux_loss_coef = 1.0
        again = _mean_loss(model, 0, 0.0)
        assert again == pooled, "the page says that a change of the configuration does nothing"
    model.router_aux_loss_coef = 0.0
    before = _mean_loss(model, 0, 0.0)
    assert before < pooled - 1e-3, "the page says that the model's own coefficient counts"
    _mean_loss(model, 0, 0.001).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return SimpleNamespace(loss=before.item(), norm=norm, held=model.num_parameters())


def _mean_loss(model: Any, step: int, coefficient: float) -> Tensor:
    """Of the four ranks' batches together, with the loss of balance of all their tokens in every layer."""
    batches = [batch(rank, step) for rank in range(4)]
    outs = [model(input_ids=b, labels=b, output_router_logits=True) for b in batches]
    loss = torch.stack([out.loss for out in outs]).mean()
    for of_a_layer in zip(*(out.router_logits for out in outs), strict=True):
        logits = torch.cat(of_a_layer)
        rows = logits.topk(2).indices.flatten().bincount(minlength=EXPERTS)
        loss = loss + coefficient * EXPERTS * (rows / rows.sum() * logits.softmax(-1).mean(0)).sum()
    return loss


def _ten_steps(text: str, name: str, ep_size: int) -> float:
    """The largest distance of a parameter from one process's, over how far that one moved."""
    from transformers import AutoModelForCausalLM

    for told, said in (
        ("fsdp_mixed_precision=True", "fsdp_mixed_precision=False"),
        ("torch.optim.AdamW(", "torch.optim.SGD("),
        ("lr=1e-5, fused=True", "lr=0.1"),
        ("0.001 * balance", "0.3 * balance"),
    ):
        text = _put(text, told, said)
    batches = [batch(dist.get_rank(), step) for step in range(10)]
    folder = f"{name}/ten_{ep_size}"
    made = run_block(text, name=name, world_size=4, ep_size=ep_size, batches=batches, folder=folder)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model.router_aux_loss_coef = 0.0
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        _mean_loss(model, step, 0.3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    gaps = []
    for found, right, first in zip(
        made["model"].parameters(), model.parameters(), start, strict=True
    ):
        moved = (right - first).norm()
        gaps.append(((found.full_tensor() - right).norm() / moved).item())
    return max(gaps)


def _by_transformers(text: str, name: str, ep_size: int) -> SimpleNamespace:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.checkpoint import load_optimizer_distributed

    folder = f"{name}/trained_{ep_size}"
    batches = [batch(dist.get_rank())]
    made = run_block(text, name=name, world_size=4, ep_size=ep_size, batches=batches, folder=folder)
    model, optimizer = made["model"], made["optimizer"]
    again: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=made["layout"], dtype=torch.float32
    )
    parts: dict[Any, list[Any]] = {}
    for p in again.parameters():
        parts.setdefault(p.device_mesh, []).append(p)
    loaded = torch.optim.AdamW([{"params": part} for part in parts.values()], lr=1e-5, fused=True)
    load_optimizer_distributed(again, loaded, f"{folder}/optimizer")
    pairs = list(zip(model.parameters(), again.parameters(), strict=True))
    reloads = all(
        torch.equal(_local(mine), _local(other))
        and torch.equal(
            _local(optimizer.state[mine]["exp_avg"]), _local(loaded.state[other]["exp_avg"])
        )
        for mine, other in pairs
    )
    report = SimpleNamespace(
        loss=made["out"].loss.item(),
        norm=made["norm"].item(),
        held=sum(_local(p).numel() for p in model.parameters()),
        load=made["load"].max().item(),
        rows=made["by_rank"].sum().item(),
        reloads=reloads,
    )
    if ep_size == 1:  # what the page advises if computing waits for weights
        for layer, following in pairwise(model.model.layers):
            layer.set_modules_to_forward_prefetch([following])
        assert torch.isfinite(model(input_ids=batches[0], labels=batches[0]).loss)
    return report


def _local(tensor: Any) -> Tensor:
    return tensor.to_local()
