"""One rank of a large job, simulated whole: the lesson's composition around a real model's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.models import Transformer, TransformerConfig
from utils.parallel import ParallelDims, adamw, clip_grad_norm, materialise
from utils.simulation import simulate

__all__ = ["simulated_rank"]


def simulated_rank(
    shape: ModelShape,
    dims: ParallelDims,
    rank: int,
    *,
    part_of: Callable[..., Any],
    passes_of: Callable[..., Any],
    micro_batches: int,
    length: int,
    zero_stage: int = 1,
) -> Any:
    """Memory and traffic of one rank's step, bf16 products over fp32 states, one row a micro-batch.

    Args:
        shape: of the model.
        dims: ranks along every axis.
        rank: which of them.
        part_of: `part_of(dims, model, zero_stage, mixed=True)` gives the rank's part and its mesh.
        passes_of: `passes_of(part, mesh, dims, micro_batch, micro_batches, length, dtype,
            zero_stage)` gives the function that runs forward and backward.
        micro_batches: of a step, on each replica.
        length: tokens of a row.
        zero_stage: what the data ranks share out.

    Raises:
        SimulationError: the step needs data.
    """
    kept: dict[str, Any] = {}

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Transformer(TransformerConfig.from_shape(shape))
        part, kept["mesh"] = part_of(dims, model, zero_stage, mixed=True)
        materialise([part], kept["mesh"], torch.device("cpu"))
        streams = (1, micro_batches, length, torch.bfloat16, zero_stage)
        kept["passes"] = passes_of(part, kept["mesh"], dims, *streams)
        return part, adamw([part], 1e-4)

    def step(part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rows = torch.zeros(micro_batches, length, dtype=torch.long)
        with loss_parallel():
            kept["passes"](rows, rows, 1.0)
        clip_grad_norm(optimizer, kept["mesh"], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    name = f"{shape.name}: {dims}"
    return simulate(build, step, device="A100 80GB", world=dims, rank=rank, name=name)


check_public(globals())
