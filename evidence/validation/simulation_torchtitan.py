"""torchtitan's FSDP2 rows without torch.compile: Llama 3.1 8B on 8 and on 128 GPUs.

Written after github.com/pytorch/torchtitan at ba24697 (December 2024, when the table was made):
parallelisms/parallelize_llama.py, models/llama/model.py, optimizer.py and train.py with
train_configs/llama3_8b.toml: fp32 parameters, computing in bf16, reducing in fp32, foreach AdamW,
selective checkpointing by operation (every second product is recomputed), logits cast to fp32.
Keys and values are repeated for every query head; RoPE computes in fp32.

The table's other rows run torch.compile or float8, which no simulation of eager operations does.
Published is reserved memory. FSDP2 takes its gathered parameters and its reduced gradients on
streams of their own (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), whose blocks no
other stream can use again; the replayed allocator has one stream, so it reserves too little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import model_shape
from utils.memory import Measurement
from utils.models import Transformer, TransformerConfig
from utils.models.transformer import Attention, Block, Rotation
from utils.simulation import simulate
from utils.units import GIB

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def torchtitan_comparisons() -> Iterator[Comparison]:
    """Reserved GiB, the largest of all ranks."""
    for row in table("torchtitan"):
        if row["compile"] == "0":
            found = torchtitan_step(whole(row["n_gpus"]), whole(row["local_batch"]))
            case = f"{row['model']} on {row['n_gpus']} GPUs, selective checkpointing"
            size = model_shape("llama-3-8b").parameter_count
            yield Comparison(
                "torchtitan FSDP2",
                "reserved GiB",
                case,
                float(row["memory_gib"]),
                (found.reserved_bytes or 0) / GIB,
                size,
            )


def torchtitan_step(gpus: int, sequences: int, length: int = 8192) -> Measurement:
    """Simulate rank 0 of a training step."""
    config = TransformerConfig.from_shape(model_shape("llama-3-8b"), rotary_base=500_000.0)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Transformer(config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp = {"mesh": init_device_mesh("cpu", (gpus,)), "mp_policy": policy}
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            block.attention.__class__ = RepeatedAttention
            block.forward = _checkpointed(block.forward)
            fully_shard(block, reshard_after_forward=index < config.layers - 1, **fsdp)
        fully_shard(model, reshard_after_forward=True, **fsdp)
        model.to_empty(device="cpu")
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)

    def step(model: nn.Module, optimizer: Any) -> None:
        tokens = torch.zeros(sequences, length, dtype=torch.long)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        del logits
        loss.backward()
        optimizer.step()

    return simulate(build, step, device="H100", world=gpus, name="torchtitan")


class RepeatedAttention(Attention):
    """The course's attention with torchtitan's fp32 rotation, and keys and values repeated."""

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        query, key = (_turned(part, rotation) for part in (query, key))
        each = query.shape[2] // key.shape[2]
        key, value = (_repeated(part, each) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    """Pairs of channels as complex fp32 numbers, times the rotation, and back."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.complex(*(part.float() for part in rotation))[:, :, None]  # (1, S, 1, D / 2)
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


def _repeated(x: Tensor, each: int) -> Tensor:
    shape = (*x.shape[:3], each, x.shape[3])
    return x.unsqueeze(3).expand(shape).reshape(*x.shape[:2], -1, x.shape[3])


def _checkpointed(forward: Any) -> Any:
    def run(*args: Any) -> Any:
        return checkpointing.checkpoint(
            forward, *args, use_reentrant=False, context_fn=_contexts, preserve_rng_state=False
        )

    return run


def _contexts() -> tuple[Any, Any]:
    """Keep what is dear to compute, but every second matrix product."""
    products: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products[context.is_recompute] += func is aten.mm.default
        second = func is aten.mm.default and products[context.is_recompute] % 2 == 0
        keep = func in KEPT and not second
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpointing.create_selective_checkpoint_contexts(policy)
