"""Runs the blocks of lesson 19's last cell, on ranks, and asserts what the page promises of them."""

from __future__ import annotations

import copy
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.lessons.blocks import run_block
from utils.ranks import run_ranks

from .workers import expert

EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 16, 12, 24


def block_1(text: str) -> None:
    """transformers: one process's loss and norm, a quarter of the parameters, a load, and what reloads equal."""
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


def block_2(text: str) -> None:
    """FSDP over replicas, two or one, also of one expert: one process's gradients, each number on one of four ranks."""
    # In fp64 FSDP divides a group of one twice, before and after the reduction that it leaves out.
    for experts, expert_ranks, dtype, near in (
        (8, 2, torch.float64, 1e-9),
        (8, 2, torch.float32, 1e-5),
        (8, 4, torch.float32, 1e-5),
        (2, 2, torch.float64, 1e-9),
    ):
        for report in run_ranks(_by_fsdp, 4, text, experts, expert_ranks, dtype):
            assert report.gap < near, f"gradients are {report.gap:.0e} from those of one process"
            assert report.held * 4 == report.whole, "an expert's number lies on more than one rank"


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


def _batch(rank: int) -> Tensor:
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(rank))


def _alone(folder: str) -> SimpleNamespace:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def loss() -> Tensor:
        batches = map(_batch, range(4))
        return torch.stack(
            [model(input_ids=b, labels=b, output_router_logits=True).loss for b in batches]
        ).mean()

    before = loss()
    before.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    with torch.no_grad():
        model.config.router_aux_loss_coef = 1.0
        assert loss() == before, "the page says that a change of the configuration does nothing"
        model.router_aux_loss_coef = 1.0
        assert loss() > before + 0.5, "the page says that the model's own coefficient counts"
    return SimpleNamespace(loss=before.item(), norm=norm, held=model.num_parameters())


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
    loaded = torch.optim.AdamW(again.parameters(), lr=1e-5)
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
    model: Any = nn.Module()
    model.layers = nn.ModuleList([_Layer(experts), _Layer(experts)])
    alone, rank = copy.deepcopy(model.to(dtype)), dist.get_rank()
    layers: list[Any] = list(model.layers)
    right_layers: list[Any] = list(alone.layers)
    for layer in layers:
        layer.experts.keep(rank % expert_ranks, expert_ranks)
    made = run_block(
        text, model=model, device=torch.device("cpu"), world_size=4, expert_ranks=expert_ranks
    )
    for layer in layers:
        layer.experts.group = made["mesh"].get_group("experts")
    x = torch.randn(4, TOKENS, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))
    layers[1](layers[0](x[rank])).square().mean().backward()
    right_layers[1](right_layers[0](x.flatten(0, 1))).square().mean().backward()
    gaps = []
    for mine, whole in zip(layers, right_layers, strict=True):
        for name in ("w_in", "w_out"):
            right = getattr(whole.experts, name).grad.chunk(expert_ranks)[rank % expert_ranks]
            found = getattr(mine.experts, name).grad.full_tensor()
            gaps.append(((found - right).norm() / right.norm()).item())
        found = mine.router.weight.grad.full_tensor()
        gaps.append(((found - whole.router.weight.grad).norm() / found.norm()).item())
    held = sum(layer.experts.w_in.to_local().numel() for layer in layers)
    return SimpleNamespace(
        gap=max(gaps), held=held, whole=sum(layer.experts.w_in.numel() for layer in right_layers)
    )
