"""More programs: libraries that shard, page and quantize. ZOO has the others too."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from zoo_cases import LINEAR, SMALL_LLAMA, adamw, add, language, update
from zoo_programs import ZOO as ZOO
from zoo_programs import mlp, summed

# --- libraries that shard, page and quantize -----------------------------------------------------


def qlora() -> Any:
    """Linear4bit by hand, as transformers places it, under peft's adapters."""
    import bitsandbytes as bnb

    model = hf.LlamaForCausalLM(SMALL_LLAMA).to(torch.bfloat16)
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            old = getattr(block.self_attn, name)
            new = bnb.nn.Linear4bit(
                old.in_features,
                old.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            setattr(block.self_attn, name, new.to(torch.bfloat16))
    model = peft.prepare_model_for_kbit_training(model.to("cuda"))
    return adamw(peft.get_peft_model(model, peft.LoraConfig(target_modules=LINEAR)))


add("QLoRA with Linear4bit", qlora, language, small=True)


def paged() -> Any:
    from bitsandbytes.optim import PagedAdamW8bit

    model = mlp().cuda()
    return model, PagedAdamW8bit(model.parameters())


add("paged optimizer", paged, lambda m, o: update(summed(m), o), small=True)


def sharded(rank: int = 0) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (8,))
    model = mlp().cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return adamw(fully_shard(model, mesh=mesh))


add("FSDP2 on a mesh of cuda", sharded, lambda m, o: update(summed(m), o), world=8)


def sharded_in_place() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return adamw(FullyShardedDataParallel(mlp().cuda(), device_id=0))


add("FSDP1", sharded_in_place, lambda m, o: update(summed(m), o), world=8, says="fully_shard")
add(
    "DistributedDataParallel",
    lambda: adamw(nn.parallel.DistributedDataParallel(mlp().cuda(), device_ids=[0])),
    lambda m, o: update(summed(m), o),
    world=8,
)


def prepared() -> Any:
    from accelerate import Accelerator

    with_accelerate = Accelerator(mixed_precision="bf16")
    model, optimizer = with_accelerate.prepare(*adamw(mlp()))
    model.accelerator = [with_accelerate]
    return model, optimizer


def accelerated(model: Any, optimizer: Any) -> None:
    model.accelerator[0].backward(summed(model))
    optimizer.step()
    optimizer.zero_grad()


add("accelerate", prepared, accelerated)


def staged(model: Any, optimizer: Any, rank: int, static: bool = True, grads: bool = True) -> None:
    """One of four pipeline stages; static inputs and outputs are what a simulation needs."""
    import torch.distributed.pipelining as pp

    micro, where = torch.randn(2, 64, requires_grad=grads), torch.device("cpu")
    known = {"input_args": (micro,), "output_args": (micro.detach().requires_grad_(grads),)}
    stage = pp.PipelineStage(model, rank, 4, where, **known if static else {})
    schedule = pp.Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    inputs = (torch.randn(8, 64),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.randn(8, 64) if rank == 3 else None)
    optimizer.step()
    optimizer.zero_grad()


for _rank in range(4):
    add(
        f"torch.distributed.pipelining, stage {_rank}",
        lambda: adamw(nn.Linear(64, 64)),
        partial(staged, rank=_rank),
        world=4,
        rank=_rank,
    )
add(
    "pipelining, shapes left open",
    lambda: adamw(nn.Linear(64, 64)),
    partial(staged, rank=1, static=False),
    world=4,
    rank=1,
    says="input_args",
)
add(
    "pipelining, no gradients expected",
    lambda: adamw(nn.Linear(64, 64)),
    partial(staged, rank=1, grads=False),
    world=4,
    rank=1,
    says="requires_grad_",
)
