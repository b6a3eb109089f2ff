"""One rank of a published mixture of experts at its real size, for the simulator.

Attention, norms, routers and shared experts are those of the transformers library; routed experts are
this rank's share, reached by two exchanges. A simulation has no values: how many rows come is told to it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from utils.fitting.model_configs import model_config
from utils.memory.measurement import Measurement
from utils.models.pretrained import enable_checkpointing
from utils.simulation import extrapolate

TOKENS = 4096


class _Exchange(torch.autograd.Function):
    """`out` rows go, as many to every rank, and `into` rows come; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: int, group: Any) -> Tensor:
        ctx.out, ctx.group = len(rows), group
        ranks = dist.get_world_size(group)
        got = rows.new_empty(into, *rows.shape[1:])
        dist.all_to_all_single(got, rows, _parts(into, ranks), _parts(len(rows), ranks), group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent = _Exchange.apply(gradients[0].contiguous(), ctx.out, ctx.group)
        return sent, None, None  # pyright: ignore[reportReturnType]


def _parts(rows: int, ranks: int) -> list[int]:
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


class RankExperts(nn.Module):
    """This rank's share of a layer's routed experts; called as those of transformers are.

    Args:
        config: of a model of the transformers library.
        group: the ranks that share the experts; None for all.
        load: rows that come, over the mean of the ranks.
        recompute: keep only the rows that came, and compute the experts on them again in backward.
    """

    def __init__(
        self, config: Any, group: Any = None, load: float = 1.0, recompute: bool = False
    ) -> None:
        super().__init__()
        held = config.num_local_experts // dist.get_world_size(group)
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.group, self.held, self.load, self.recompute = group, held, load, recompute
        self.w_in = nn.Parameter(torch.empty(held, hidden, 2 * width))
        self.w_out = nn.Parameter(torch.empty(held, width, hidden))

    def forward(self, x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """(T, H), and the experts and weights (T, k) of its tokens."""
        k = choice.shape[-1]
        order = choice.flatten().argsort()
        came = round(self.load * len(order) / self.held) * self.held
        ends = torch.arange(1, self.held + 1, device=x.device) * (came // self.held)
        if dist.get_world_size(self.group) == 1:  # all experts are here: no exchange, and one sort
            back = self._done(x[order // k], ends.int())
        else:
            rows = _Exchange.apply(x[order // k], came, self.group)
            by = torch.arange(came, device=x.device).argsort()  # sorted by sender, then by expert
            done = self._done(rows[by], ends.int())
            back = _Exchange.apply(done[by.argsort()], len(order), self.group)
        rows = back[order.argsort()].view(*weight.shape, -1)
        return (weight[..., None].to(rows.dtype) * rows).sum(1)

    def _done(self, rows: Tensor, ends: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._work, rows, ends, use_reentrant=False)
        return self._work(rows, ends)

    def _work(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, self.w_in, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.w_out, offs=ends)


def qwen3_30b_a3b(
    expert_ranks: int = 8,
    ranks: int = 8,
    load: float = 1.0,
    card: str = "H100",
    recompute: bool = False,
    layers_again: bool = False,
    sequences: int = 1,
    chunk: int = 0,
) -> Measurement:
    """A step of one of `ranks` ranks: experts over groups of `expert_ranks`, the rest by FSDP.

    Parameters, gradients and Adam's states in fp32, computing in bf16; sequences of 4,096 tokens. The loss takes
    whole logits, or those of `chunk` tokens at a time, made again in backward.
    With `expert_ranks` of 1 FSDP alone shares the experts, and no row travels. This rank gets `load` times
    the rows of the mean rank in every layer. `recompute` is of experts alone,
    `layers_again` of whole layers, as the transformers library does it, with their exchanges.
    """
    from transformers import Qwen3MoeForCausalLM

    def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        config: Any = model_config("Qwen/Qwen3-30B-A3B")
        config.num_hidden_layers = layers
        mesh = init_device_mesh(
            "cpu", (ranks // expert_ranks, expert_ranks), mesh_dim_names=("replicas", "experts")
        )
        whole = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model: Any = Qwen3MoeForCausalLM(config)
        if layers_again:
            enable_checkpointing(model)
        if chunk:  # in the head, as FSDP gathers its weight only inside the model's forward
            model.lm_head.forward = partial(_loss_in_chunks, model.lm_head, chunk)
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            with torch.device("meta"):
                experts: Any = RankExperts(config, mesh["experts"].get_group(), load, recompute)
            layer.mlp.experts = experts
            fully_shard(experts, mesh=mesh["replicas"], mp_policy=low)
            experts.set_gradient_divide_factor(ranks)
            fully_shard(layer, mesh=whole, mp_policy=low)
        fully_shard(model, mesh=whole, mp_policy=low)
        model.to_empty(device="cpu")
        return model, torch.optim.AdamW(model.parameters())

    again = "layers recomputed" if layers_again else "experts recomputed"
    kept = again if layers_again or recompute else "all kept"
    # Layers are alike from the second on, so the shortest depths show all there is.
    return extrapolate(
        build,
        partial(_language_step, sequences),
        layers=48,
        from_layers=(2, 3, 4),
        device=card,
        world=ranks,
        name=f"{kept}, load {load:g}",
    )


@cache
def token_flops(length: int = TOKENS, forwards: int = 1) -> tuple[float, float]:
    """Floating-point operations of Qwen3-30B-A3B for a token, forward and backward: all but the experts, and the experts.

    The embedding is read without a product. Attention's scores and sums, in sequences of `length` tokens, are
    halved by causality. Layers run forward `forwards` times, and the output's matrix once.
    """
    c: Any = model_config("Qwen/Qwen3-30B-A3B")
    experts = c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
    heads = c.num_attention_heads * c.head_dim
    projections = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
    router = c.hidden_size * c.num_local_experts
    layer = projections + router + length * heads
    layers = (4.0 + 2.0 * forwards) * c.num_hidden_layers
    return layers * layer + 6.0 * c.vocab_size * c.hidden_size, layers * experts


def _language_step(sequences: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.zeros(sequences, TOKENS, dtype=torch.long)
    out = model(input_ids=tokens, use_cache=False).logits  # or the loss, where the head makes it
    loss = out if out.dim() == 0 else F.cross_entropy(out.float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _loss_in_chunks(head: nn.Linear, chunk: int, hidden: Tensor) -> Tensor:
    def loss(part: Tensor) -> Tensor:
        aim = torch.zeros(len(part), dtype=torch.long, device=part.device)
        return F.cross_entropy(F.linear(part, head.weight).float(), aim, reduction="sum")

    parts = hidden.flatten(0, 1).split(chunk)
    total = torch.stack([checkpoint(loss, part, use_reentrant=False) for part in parts]).sum()  # pyright: ignore[reportArgumentType, reportCallIssue]
    return total / hidden[..., 0].numel()
