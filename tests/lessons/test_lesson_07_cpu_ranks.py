"""`Trainer` with `deepspeed=` and `fsdp=` on ranks without GPUs: the plain run's losses."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils.lessons.lesson_07.cpu_ranks import fsdp_on_cpu
from utils.ranks import run_ranks
from utils.techniques.deepspeed import deepspeed_missing, deepspeed_problem, load_deepspeed
from utils.techniques.zero import resident, zero_config, zero_engine

pytestmark = pytest.mark.deepspeed
needs_deepspeed = pytest.mark.skipif(bool(deepspeed_missing()), reason=str(deepspeed_missing()))
SEQUENCES = 4  # of one step, over all ranks
SHARDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "deepspeed": {
        "deepspeed": {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
        }
    },
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": True,
        },
    },
}


def trained(kind: str, folder: str) -> tuple[list[float], str, int]:
    """Losses of two steps, the class of what was trained, and this rank's trained elements."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    warnings.simplefilter("ignore")
    if kind == "deepspeed":
        load_deepspeed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 16))]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=SEQUENCES // dist.get_world_size(),
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        disable_tqdm=True,
        **SHARDED[kind],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    if arguments.fsdp:
        fsdp_on_cpu(trainer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    kept = [p for p in trainer.model_wrapped.parameters() if p.requires_grad]
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in kept)
    return losses, type(trainer.model_wrapped).__name__, held


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str, int]:
    return run_ranks(trained, 1, "plain", str(tmp_path_factory.mktemp("plain")))[0]


@needs_deepspeed
def test_trainer_with_deepspeed(plain: Any, tmp_path: Path) -> None:
    assert deepspeed_problem() is None
    for losses, name, _ in run_ranks(trained, 2, "deepspeed", str(tmp_path), timeout_seconds=200):
        assert name == "DeepSpeedEngine"
        assert losses == pytest.approx(plain[0], rel=1e-6)


def test_trainer_with_fsdp(plain: Any, tmp_path: Path) -> None:
    for losses, name, held in run_ranks(trained, 2, "fsdp", str(tmp_path)):
        assert name.startswith("FSDP")
        assert held == plain[2] / 2
        assert losses == pytest.approx(plain[0], rel=1e-6)


def test_arguments_without_fsdp_are_refused() -> None:
    arguments = types.SimpleNamespace(fsdp=None)
    with pytest.raises(ValueError, match="no fsdp=True"):
        fsdp_on_cpu(types.SimpleNamespace(args=arguments))


def offloaded(offload: bool) -> tuple[list[float], dict[str, float], str]:
    """Losses of ZeRO-2 on one rank, what it holds in bytes per parameter, and the device."""
    load_deepspeed()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    extra = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = zero_config(2, 4096, world_size=1, precision="fp32", **extra)
    engine = zero_engine(model, optimizer, {**config, "zero_force_ds_cpu_optimizer": False})
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(1, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rows = {row.path.rpartition(".")[2]: row.bytes / 4096 for row in resident(engine)}
    return losses, rows, str(next(engine.module.parameters()).device)


@needs_deepspeed
def test_zero_2_on_one_rank_offloads_twelve_bytes_a_parameter() -> None:
    """Master copy and two moments lie where the optimizer is; the host holds a gradient too."""
    assert deepspeed_problem() is None
    (plain, here, device), (moved, there, _) = (
        run_ranks(offloaded, 1, offload, timeout_seconds=200)[0] for offload in (False, True)
    )
    assert device == "cpu"
    assert plain == moved
    for rows in (here, there):
        states = [size for path, size in rows.items() if "fp32_groups" in path or "exp_avg" in path]
        assert sum(states) == 12
