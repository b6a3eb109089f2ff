"""Simulated ranks of Megatron-LM beside its CI's bytes, and beside Korthikanti's activations."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from evidence.validation import megatron
from evidence.validation.comparison import Comparison
from evidence.validation.simulation_megatron import Rank
from evidence.validation.simulation_megatron_step import share_step
from evidence.validation.states import BATCHES, FIGURE_1, korthikanti_plan
from evidence.validation.tables import table
from utils.catalog import ModelShape, model_shape
from utils.memory import Category, Measurement
from utils.planner import Plan
from utils.planner.schedules import schedule_actions
from utils.planner.stages import padded_vocabulary
from utils.units import GIB, MIB

# Nothing in the repository says how many GPUs ran the 15B model. 256 suits the bytes between steps
# of all three platforms (and dp must divide its 96 micro-batches), so those judge less.
DEDUCED_DP = 32
# What the table has no column for, from each case's model_config.yaml.
CASES = {
    "gpt/gpt3_7b_tp1_pp4_memory_speed": {"fused_gradients": False},
    "gpt/gpt3_15b_8t_release_sm": {
        "bias": False,
        "rotary": 0.5,
        "squared_relu": True,
        "dp": DEDUCED_DP,
    },
}


@dataclass(frozen=True)
class Platform:
    """What differs between the runs of the CI, each by a rule that its source code states.

    Attributes:
        device: Of the catalog; a GB200's GPU is taken as an H100, whose choices are the same.
        copied_attention: Transformer Engine prefers cuDNN's attention from compute capability 9.0
            on ("preference on Hopper+" in dot_product_attention/utils.py), flash attention below.
            Flash attention wants the batch first: inputs and result are copied to that order and
            back (`transpose(0, 1).contiguous()` in attention.py, later backends.py).
        cached_stand_ins: `get_dummy_wgrad` of Transformer Engine from 2.3 on (module/base.py, pull
            request 1651), which Megatron-LM's head calls too (core/tensor_parallel/layers.py).
            The "lts" row has the bytes of golden_values_0.11.0_PyT24.10, from before it.
        workspace_bytes: Transformer Engine's for cuBLAS (module/base.py) is 4 MiB below 9.0, else
            32 MiB; PyTorch's is 8 MiB there, or the 32 MiB of CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """

    device: str
    copied_attention: bool
    cached_stand_ins: bool
    workspace_bytes: int


A100 = Platform("A100 80GB", True, True, 36 * MIB)
HOPPER = Platform("H100", False, True, 64 * MIB)
PLATFORMS = {
    "lts_dgx_a100": replace(A100, cached_stand_ins=False, workspace_bytes=12 * MIB),
    "dev_dgx_a100": A100,
    "dev_dgx_h100": HOPPER,
    "dev_dgx_gb200": HOPPER,
}


def megatron_comparisons(platforms: Container[str] = PLATFORMS) -> Iterator[Comparison]:
    """Bytes of the last rank between steps and at the peak, for dense GPT models of 7B and up."""
    for row in table("megatron_golden"):
        if row["test_case"] not in CASES or row["platform"] not in platforms:
            continue
        model, plan, batch = megatron.setup(row)
        passes = plan.micro_batches(batch) if plan.pp > 1 else 1  # one after another: all alike
        rank = _last_rank(model, plan, row["test_case"])
        found = _simulated(
            rank, plan.pp, passes, plan.micro_batch, batch.sequence_length, row["platform"]
        )
        case = f"{row['test_case'].removeprefix('gpt/')} on {row['platform']}"
        for quantity, column, size in (
            ("GiB between steps", "allocated_bytes_last", int(found.timeline.alive_bytes[-1])),
            ("peak GiB", "max_allocated_bytes", found.peak_bytes),
        ):
            deduced = rank.dp == DEDUCED_DP and quantity == "GiB between steps"
            yield Comparison(
                "Megatron-LM CI, 7B and up",
                quantity,
                case,
                float(row[column]) / GIB,
                size / GIB,
                model.parameter_count / plan.tp / plan.pp,
                deduced,
            )


def _last_rank(model: ModelShape, plan: Plan, case: str) -> Rank:
    sizes = {
        "chunks": plan.virtual_stages,
        "layers": model.layers // plan.pp // plan.virtual_stages,
        "hidden": model.hidden,
        "heads": model.heads,
        "groups": model.key_value_heads,
        "feedforward": model.feedforward,
        "vocabulary": padded_vocabulary(model, plan),
        "tp": plan.tp,
        "sequence_parallel": plan.sequence_parallel,
        "dp": plan.dp,
        "first": plan.pp == 1,
        "last": True,
        "dropout": 0.1 * plan.dropout,
    }
    return Rank(**{**sizes, **CASES[case]})


@functools.cache
def _on(
    rank: Rank, pp: int, micro_batches: int, sequences: int, length: int, platform: Platform
) -> Measurement:
    rank = replace(
        rank,
        copied_attention=platform.copied_attention,
        workspace_bytes=platform.workspace_bytes,
        cached_stand_ins=platform.cached_stand_ins,
    )
    passes = schedule_actions("1f1b", pp, micro_batches, rank.chunks)[-1]
    return share_step(rank, passes, sequences, length, platform.device)


def _simulated(rank: Rank, pp: int, m: int, b: int, length: int, platform: str) -> Measurement:
    return _on(rank, pp, m, b, length, PLATFORMS[platform])


def korthikanti_comparisons(names: tuple[str, ...] = ("22B",)) -> Iterator[Comparison]:
    """Figure 1: activations of a whole model without pipeline stages, GiB.

    By default the 22B model, all 48 layers: the others' figures are the same layers, counted.
    """
    for row in table("korthikanti_figure1"):
        if row["model"] not in names:
            continue
        for column, optimized in (("fig1_act_none_gib", False), ("fig1_act_seqsel_gib", True)):
            found = korthikanti_activations(row["model"], optimized) / GIB
            kind = "sequence parallel, scores recomputed" if optimized else "all kept"
            yield Comparison(
                "Korthikanti Figure 1",
                "activations GiB",
                f"{row['model']}, {kind}",
                float(row[column]),
                found,
                0.0,
            )


def korthikanti_activations(name: str, optimized: bool) -> int:
    """Bytes that the layers keep from forward to backward."""
    model, plan = model_shape(FIGURE_1[name][0]), korthikanti_plan(name, optimized)
    rank = Rank(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        groups=model.heads,
        feedforward=model.feedforward,
        vocabulary=padded_vocabulary(model, plan),
        tp=plan.tp,
        sequence_parallel=optimized,
        first=True,
        last=True,
        scores="recomputed" if optimized else "kept",
    )
    passes = schedule_actions("1f1b", 1, 1)[0]
    found = share_step(rank, passes, BATCHES[name][1], 2048, "A100 80GB")
    return sum(
        block.bytes
        for block in found.timeline.allocations
        if block.category is Category.ACTIVATIONS and block.module.startswith("chunks")
    )
