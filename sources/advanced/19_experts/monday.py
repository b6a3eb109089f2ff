"""Runs the blocks of lesson 19's last cell, on ranks, and asserts what the page promises of them."""

from __future__ import annotations

import copy
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from utils.lessons.blocks import run_block
from utils.ranks import run_ranks, traffic

from .workers import expert

EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 16, 12, 24


def block_1(text: str) -> None:
    """transformers: one process's loss and norm, ten steps' parameters, a quarter held, a load, and what reloads equal."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_save_small_mixture, 1, folder)
        wanted = run_ranks(_alone, 1, folder)[0]
        for ep_size in (2, 4):
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


def _put(text: str, told: str, said: str) -> str:
    assert text.count(told) == 1, f"the page's lines no longer say {told!r} once"
    return text.replace(told, said)


def block_2(text: str) -> None:
    """FSDP over replicas, two or one, also of one expert: one process's gradients, each number on one of four ranks.

    As it stands its rows are bf16, and what it saved loads equal, which FSDP's own tensors do not.
    """
    exact = _put(
        text, "(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)", "()  # as the test says"
    )
    # In fp64 FSDP divides a group of one twice, before and after the reduction that it leaves out.
    for experts, expert_ranks, dtype, near in (
        (8, 2, torch.float64, 1e-9),
        (8, 2, torch.float32, 1e-5),
        (8, 4, torch.float32, 1e-5),
        (2, 2, torch.float64, 1e-9),
    ):
        for report in run_ranks(_by_fsdp, 4, exact, experts, expert_ranks, dtype):
            assert report.gap < near, f"gradients are {report.gap:.0e} from those of one process"
            assert report.held * 4 == report.whole, "an expert's number lies on more than one rank"
            assert abs(report.norm / report.right_norm - 1) < 1e-4, "the norm leaves experts out"
            assert abs(report.clipped - 0.01) < 1e-4, "gradients are not clipped to the limit"
    for experts, expert_ranks in ((8, 2), (8, 4), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(_saved_by_fsdp, 4, text, experts, expert_ranks, folder)
        assert {report.rows for report in found} == {("bfloat16",)}, "rows travel in another dtype"
        assert all(report.reloads for report in found), "what was saved loads as something else"
        assert not all(report.by_name for report in found), "the page says that experts are lost"


def _save_small_mixture(folder: str) -> None:
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
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)


def _batch(rank: int, step: int = 0) -> Tensor:
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(rank + 4 * step))


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
    batches = [_batch(rank, step) for rank in range(4)]
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
    batches = [_batch(dist.get_rank(), step) for step in range(10)]
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
    batches = [_batch(dist.get_rank())]
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
    return SimpleNamespace(
        loss=made["out"].loss.item(),
        norm=made["norm"].item(),
        held=sum(_local(p).numel() for p in model.parameters()),
        load=made["load"].max().item(),
        rows=made["by_rank"].sum().item(),
        reloads=reloads,
    )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local()


class _Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = _Held(experts)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, choice, weight)


class _Stack(nn.Module):
    """Two layers, called as one model: FSDP gathers ahead from its root on."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(experts), _Layer(experts)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Held(nn.Module):
    """All experts; `keep` leaves this rank its share, and then rows are exchanged over a group."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(experts, HIDDEN, 2 * WIDTH) * 0.2)
        self.w_out = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.2)
        self.experts, self.place, self.group = experts, 0, None

    def keep(self, place: int, places: int) -> None:
        self.place = place
        for name, whole in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(whole.detach().chunk(places)[place].clone()))

    def forward(self, x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        # The plainest exchange: every rank's tokens to every rank of the group, whose parts are added.
        held, places = len(self.w_in), self.experts // len(self.w_in)
        table = x.new_zeros(len(x), self.experts).scatter(1, choice, weight)
        if places == 1:
            return _weighted(x, table, self.w_in, self.w_out)
        each = torch.cat([x.repeat(places, 1), torch.cat(table.split(held, 1))], 1)
        sizes = [len(x)] * places
        came = _send(each, sizes, self.group)
        done = _weighted(came[:, :HIDDEN], came[:, HIDDEN:], self.w_in, self.w_out)
        return _send(done, sizes, self.group).view(places, len(x), HIDDEN).sum(0)


def _weighted(x: Tensor, table: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    parts = [table[:, e, None] * expert(x, w_in[e], w_out[e]) for e in range(len(w_in))]
    return torch.stack(parts).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        got = torch.empty_like(rows)
        dist.all_to_all_single(got, rows.contiguous(), group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None  # pyright: ignore[reportReturnType]


def _send(rows: Tensor, sizes: list[int], group: Any) -> Tensor:
    assert sum(sizes) == len(rows)
    return _Exchange.apply(rows, group)  # pyright: ignore[reportReturnType]


def _by_fsdp(text: str, experts: int, expert_ranks: int, dtype: torch.dtype) -> SimpleNamespace:
    torch.manual_seed(0)
    model: Any = _Stack(experts)
    alone, rank = copy.deepcopy(model.to(dtype)), dist.get_rank()
    layers: list[Any] = list(model.layers)
    right_layers: list[Any] = list(alone.layers)
    for layer in layers:
        layer.experts.keep(rank % expert_ranks, expert_ranks)
    made = _run(text, model, expert_ranks, batches=[], folder="")
    for layer in layers:
        layer.experts.group = made["mesh"].get_group("experts")
    x = torch.randn(4, TOKENS, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))
    model(x[rank]).square().mean().backward()
    alone(x.flatten(0, 1)).square().mean().backward()
    gaps = []
    for mine, whole in zip(layers, right_layers, strict=True):
        for name in ("w_in", "w_out"):
            right = getattr(whole.experts, name).grad.chunk(expert_ranks)[rank % expert_ranks]
            found = getattr(mine.experts, name).grad.full_tensor()
            gaps.append(((found - right).norm() / right.norm()).item())
        found = mine.router.weight.grad.full_tensor()
        gaps.append(((found - whole.router.weight.grad).norm() / found.norm()).item())
    return SimpleNamespace(
        gap=max(gaps),
        held=sum(layer.experts.w_in.to_local().numel() for layer in layers),
        whole=sum(layer.experts.w_in.numel() for layer in right_layers),
        right_norm=torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item(),
        norm=made["clip"](0.01).item(),
        clipped=made["clip"](1.0).item(),
    )


def _run(text: str, model: Any, expert_ranks: int, **names: Any) -> dict[str, Any]:
    """The page's lines; without batches nothing is trained, and nothing is saved."""
    if not names["batches"]:
        text = _put(text, "dcp.save(state(), checkpoint_id=folder)", "")
    return run_block(
        text,
        model=model,
        device=torch.device("cpu"),
        world_size=4,
        expert_ranks=expert_ranks,
        loss_of=lambda model, batch: model(batch).float().square().mean(),
        **names,
    )


def _saved_by_fsdp(text: str, experts: int, expert_ranks: int, folder: str) -> SimpleNamespace:
    """Two steps; the exchanges' dtypes, and whether what is loaded is what was saved, as the page saves and by name."""
    torch.manual_seed(0)
    model: Any = _Stack(experts)
    mesh = init_device_mesh(
        "cpu", (4 // expert_ranks, expert_ranks), mesh_dim_names=("replicas", "experts")
    )
    rank = dist.get_rank()
    for layer in model.layers:
        layer.experts.keep(rank % expert_ranks, expert_ranks)
        layer.experts.group = mesh.get_group("experts")
    draw = torch.Generator().manual_seed(rank)
    batches = [torch.randn(TOKENS, HIDDEN, generator=draw) for _ in range(2)]
    with traffic() as sent:
        made = _run(text, model, expert_ranks, batches=batches, folder=folder)
    rows = {row.dtype for row in sent.rows if row.collective == "all-to-all"}
    by_name = {name: p.detach() for name, p in model.named_parameters()}
    save(by_name, checkpoint_id=f"{folder}/by_name")
    return SimpleNamespace(
        rows=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in rows)),
        reloads=_loads_equal(made["state"](), folder),
        by_name=_loads_equal(by_name, f"{folder}/by_name"),
    )


def _loads_equal(state: dict[str, Any], folder: str) -> bool:
    """Whether tensors that are set to 0 and loaded are what they were; they keep what is loaded."""
    local = {name: getattr(part, "_local_tensor", part) for name, part in state.items()}
    before = {name: part.clone() for name, part in local.items()}
    for part in local.values():
        part.zero_()
    load(state, checkpoint_id=folder)
    return all(torch.equal(part, before[name]) for name, part in local.items())
