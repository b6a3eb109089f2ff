"""Full fine-tuning in plain PyTorch, predicted beside simulated: Llama shapes in bfloat16, and FSDP2.

The step is the usual one: forward, loss, backward, AdamW as PyTorch runs it on a GPU (foreach), and
`zero_grad()`, which frees the gradients. No constant was set on these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from evidence.validation.comparison import Comparison
from utils.catalog import ModelShape, model_shape
from utils.memory import Measurement
from utils.models import Transformer, TransformerConfig
from utils.planner import Batch, Plan, memory
from utils.simulation import simulate
from utils.units import GIB

DEVICE = "H100"


@dataclass(frozen=True)
class FullFinetune:
    """One full fine-tune.

    Attributes:
        model: Its name in the catalog.
        sequences, length: Of one micro-batch.
        micro_batches: Of one step.
        gpus: 1, or those that FSDP2 shards over.
    """

    model: str
    sequences: int
    length: int
    micro_batches: int = 1
    gpus: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        shards = f", FSDP over {self.gpus}" if self.gpus > 1 else ""
        steps = f" x {self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.model}, {self.sequences} x {self.length}{steps}{shards}"


QUICK = (
    FullFinetune("llama-3.2-1b", 4, 768),
    FullFinetune("llama-3.2-1b", 4, 768, micro_batches=2),
    FullFinetune("llama-3.2-1b", 1, 512),
)
CASES = (
    *QUICK,
    FullFinetune("llama-3.2-1b", 2, 4096),
    FullFinetune("llama-2-7b", 1, 512),
    FullFinetune("llama-2-7b", 2, 2048),
    FullFinetune("llama-2-7b", 1, 1024, gpus=8),
    FullFinetune("llama-2-7b", 1, 2048, gpus=8),
)


def comparisons(cases: tuple[FullFinetune, ...] = CASES) -> Iterator[Comparison]:
    """GiB at the peak; "published" is what the simulator says."""
    for case in cases:
        shape = model_shape(case.model)
        found = _whole(shape, case) if case.gpus == 1 else _sharded(shape, case)
        yield Comparison(
            "Full fine-tunes, simulated",
            "peak GiB",
            case.name,
            found.peak_bytes / GIB,
            predicted_bytes(case) / GIB,
            shape.parameter_count,
        )


def predicted_bytes(case: FullFinetune) -> float:
    """The planner's peak."""
    plan = Plan(micro_batch=case.sequences, framework="bf16")
    if case.gpus > 1:
        plan = replace(plan, dp=case.gpus, zero_stage=3, framework="fsdp")
    sequences = case.gpus * case.sequences * case.micro_batches
    batch = Batch(sequences=sequences, sequence_length=case.length)
    return memory(case.model, plan, batch)[0].allocated_bytes


def _whole(shape: ModelShape, case: FullFinetune) -> Measurement:
    """transformers' Llama, everything in bfloat16."""
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.feedforward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.max_sequence,
        use_cache=False,
    )

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            net = transformers.LlamaForCausalLM(config)
        # The library's decorator of `to` hides its `self`.
        net = net.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
        net.to_empty(device="cpu")
        return net, torch.optim.AdamW(net.parameters(), foreach=True)

    def loss(net: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, object]:
        output = net(input_ids=tokens, labels=tokens)
        return output.loss, output

    return simulate(build, _step(case, loss), device=DEVICE, name=case.name)


def _sharded(shape: ModelShape, case: FullFinetune) -> Measurement:
    """The course's transformer under FSDP2, block by block."""
    config = TransformerConfig.from_shape(shape)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            net = Transformer(config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (case.gpus,))
        for part in (*net.blocks, net):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        net.to_empty(device="cpu")
        return net, torch.optim.AdamW(net.parameters(), foreach=True)

    def loss(net: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, object]:
        logits = net(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()), logits

    return simulate(build, _step(case, loss), device=DEVICE, world=case.gpus, name=case.name)


def _step(case: FullFinetune, forward: Any) -> Any:
    """A script's step, whose variables keep the logits alive in backward."""

    def step(net: nn.Module, optimizer: Any) -> None:
        for _ in range(case.micro_batches):
            tokens = torch.zeros(case.sequences, case.length, dtype=torch.long)
            loss, output = forward(net, tokens)
            loss.backward()
            del loss, output
        optimizer.step()
        optimizer.zero_grad()

    return step
