"""One rank of a published mixture of experts at its real size, for the simulator.

Attention, norms, routers and shared experts are those of the transformers library; routed experts are
this rank's share, reached by two exchanges. A simulation has no values, so rows are dealt evenly.
"""

from __future__ import annotations

from functools import partial
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
from utils.simulation import extrapolate, simulate

TOKENS = 4096
DEEPSEEK_STAGES, DEEPSEEK_EXPERT_RANKS = 16, 64  # arXiv:2412.19437, section 3.2


class _Exchange(torch.autograd.Function):
    """As many rows to every rank as from it; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        got = torch.empty_like(rows)
        dist.all_to_all_single(got, rows, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0].contiguous(), ctx.group), None  # pyright: ignore[reportReturnType]


class RankExperts(nn.Module):
    """This rank's share of a layer's routed experts; called as those of transformers are.

    Args:
        config: of a model of the transformers library.
        group: the ranks that share the experts; None for all.
    """

    def __init__(self, config: Any, group: Any = None) -> None:
        super().__init__()
        held = config.num_local_experts // dist.get_world_size(group)
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.group, self.held = group, held
        self.w_in = nn.Parameter(torch.empty(held, hidden, 2 * width))
        self.w_out = nn.Parameter(torch.empty(held, width, hidden))

    def forward(self, x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """(T, H), and the experts and weights (T, k) of its tokens."""
        k = choice.shape[-1]
        order = choice.flatten().argsort()
        rows = _Exchange.apply(x[order // k], self.group)
        ends = torch.arange(1, self.held + 1, device=x.device) * (rows.shape[0] // self.held)
        by = torch.arange(
            rows.shape[0], device=x.device
        ).argsort()  # sorted by sender, then by expert
        gate, up = F.grouped_mm(rows[by], self.w_in, offs=ends.int()).chunk(2, -1)
        done = F.grouped_mm(F.silu(gate) * up, self.w_out, offs=ends.int())
        back = _Exchange.apply(done[by.argsort()], self.group)
        weighted = back * weight.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(x).index_add(0, order // k, weighted)


def qwen3_30b_a3b(expert_ranks: int = 8, ranks: int = 16, card: str = "H100") -> Measurement:
    """A step of one of `ranks` ranks: experts over groups of `expert_ranks`, the rest by FSDP.

    Parameters, gradients and Adam's states in fp32, computing in bf16; one sequence of 4,096 tokens.
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
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            with torch.device("meta"):
                experts: Any = RankExperts(config, mesh["experts"].get_group())
            layer.mlp.experts = experts
            fully_shard(experts, mesh=mesh["replicas"], mp_policy=low)
            experts.set_gradient_divide_factor(ranks)
            fully_shard(layer, mesh=whole, mp_policy=low)
        fully_shard(model, mesh=whole, mp_policy=low)
        model.to_empty(device="cpu")
        return model, torch.optim.AdamW(model.parameters())

    name = f"Qwen3-30B-A3B, one of {ranks} ranks, EP {expert_ranks}"
    return extrapolate(build, _language_step, layers=48, device=card, world=ranks, name=name)


def _language_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def deepseek_v3_stage(layers: int = 4, recompute: bool = False, card: str = "H100") -> Measurement:
    """Forward and backward of one micro-batch of 4,096 tokens on a rank of DeepSeek-V3's layout.

    A stage of the middle, `layers` of 61, with 4 of 256 experts a layer; in bf16, no optimizer.
    """
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as library

    config: Any = DeepseekV3Config()
    config._attn_implementation = "sdpa"

    def build() -> tuple[nn.Module, None]:
        stage = nn.ModuleList()
        for number in range(layers):
            with torch.device("meta"):
                layer: Any = library.DeepseekV3DecoderLayer(
                    config, config.first_k_dense_replace + number
                )
                layer.mlp.experts = RankExperts(config)
            stage.append(layer)
        return stage.to(torch.bfloat16).to_empty(device="cpu"), None

    def step(stage: Any, _: None) -> None:
        width = config.qk_rope_head_dim
        turned = tuple(torch.zeros(1, TOKENS, width, dtype=torch.bfloat16) for _ in range(2))
        x = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        for layer in stage:
            passed = partial(layer, position_embeddings=turned)
            x = checkpoint(passed, x, use_reentrant=False) if recompute else passed(x)
        x.backward(torch.zeros_like(x))
        stage.zero_grad()

    how = "every layer recomputed" if recompute else "nothing recomputed"
    name = f"DeepSeek-V3, {layers} layers of a stage, {how}"
    return simulate(build, step, device=card, world=DEEPSEEK_EXPERT_RANKS, name=name)
