"""What other tools say of the same rows: memory of one GPU, by formulas they publish as code.

None of them is needed here. Those that are installed (`pip install deepspeed accelerate
llm-analysis`) are asked, the others are left out of the table. Where a tool knows no model
parallelism it is given the parameters of one model-parallel rank, which is the kindest reading.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from utils.catalog import Device, ModelShape, device
from utils.planner import Batch, Plan, memory, worst
from utils.planner.stages import block_parameters
from utils.units import GB, GIB
from utils.validation import bloom, megatron, ultrascale
from utils.validation.tables import number, table


@dataclass(frozen=True)
class PeerError:
    """How far off one tool is on one source.

    Attributes:
        source: Which rows.
        tool: Which tool; "this planner" for ours.
        rows: Rows that it answered.
        median: Of the absolute relative errors.
        bias: Median signed error.
    """

    source: str
    tool: str
    rows: int
    median: float
    bias: float


def deepspeed_bytes(model: ModelShape, plan: Plan, batch: Batch, gpu: Device) -> float:
    """DeepSpeed's estimate_zero2/3_model_states_mem_needs; no activations.

    Raises:
        ImportError: it is not installed.
    """
    count = model.parameter_count / plan.tp / plan.pp
    if plan.zero_stage == 3:
        module = importlib.import_module("deepspeed.runtime.zero.stage3")
        layer = block_parameters(model, plan.tp)
        return module.estimate_zero3_model_states_mem_needs(
            int(count), int(layer), plan.dp, 1, cpu_offload=False
        )[1]
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    ranks = plan.dp if plan.zero_stage else 1
    return module.estimate_zero2_model_states_mem_needs(int(count), ranks, 1, cpu_offload=False)[1]


def accelerate_bytes(model: ModelShape, plan: Plan, batch: Batch, gpu: Device) -> float:
    """accelerate's estimate-memory, the largest of its training figures; no activations.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module("accelerate.commands.estimate")
    whole = int(4 * model.parameter_count / plan.tp / plan.pp)
    return max(module.estimate_training_usage(whole, "bfloat16").values())


def llm_analysis_bytes(model: ModelShape, plan: Plan, batch: Batch, gpu: Device) -> float:
    """llm-analysis' weights, optimizer state, gradients and activations of one GPU.

    Raises:
        ImportError: it is not installed.
    """
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    logging.getLogger("llm_analysis").setLevel(logging.CRITICAL)
    analysis.logger.setLevel(logging.CRITICAL)
    shape = config.ModelConfig(
        name=model.name, num_layers=model.layers, n_head=model.heads, hidden_dim=model.hidden,
        vocab_size=model.vocabulary, max_seq_len=batch.sequence_length,
        num_key_value_heads=model.key_value_heads, ffn_embed_dim=model.feedforward,
        expansion_ratio=model.feedforward / model.hidden,
    )  # fmt: skip
    card = config.GPUConfig(gpu.name, gpu.memory_gb, 2000, 300, 1e-5, 312)
    split = config.ParallelismConfig(
        plan.tp, plan.pp, plan.dp, sp_size=plan.tp if plan.sequence_parallel else 1
    )
    recompute = analysis.ActivationRecomputation[plan.recompute.upper()]
    zero = analysis.DSZeRO[f"STAGE_{plan.zero_stage}" if plan.zero_stage else "NONE"]
    answer = analysis.LLMAnalysis(
        shape, card, parallelism_config=split, flops_efficiency=0.5
    ).training(
        batch_size_per_gpu=plan.micro_batch, seq_len=batch.sequence_length,
        gradient_accumulation_steps=plan.micro_batches(batch), activation_recomputation=recompute,
        ds_zero=zero, flash_attn=plan.attention == "flash", softmax_dropout=plan.dropout,
        mlp_gated_linear_units=model.family == "llama",
    )  # fmt: skip
    return answer["(weight+op_state+grad+act)_memory_per_gpu"]


Tool = Callable[[ModelShape, Plan, Batch, Device], float]
TOOLS: dict[str, Tool] = {
    "DeepSpeed estimator": deepspeed_bytes,
    "accelerate estimate-memory": accelerate_bytes,
    "llm-analysis": llm_analysis_bytes,
}
Asked = tuple[ModelShape, Plan, Batch, Device, float, float]


def rows() -> dict[str, list[Asked]]:
    """Model, plan, batch, device, published and our bytes, by source."""
    found: dict[str, list[Asked]] = {"Ultra-Scale sweep": [], "BLOOM prequel": [],
                                     "Megatron-LM CI, 7B and up": []}  # fmt: skip
    for _, row in ultrascale.measured():
        asked = ultrascale.setup(row)
        ours = memory(*asked)[0].reserved_bytes
        found["Ultra-Scale sweep"].append(
            (*asked, device("H100"), float(row["gpu_memory_gb"]) * GIB, ours)
        )
    for row in table("bloom_prequel"):
        published = number(row["mem_gb"])
        if published:
            asked = bloom.setup(row)
            ours = worst(memory(*asked)).device_bytes
            found["BLOOM prequel"].append((*asked, bloom.GPU, published * GB, ours))
    for row in table("megatron_golden"):
        asked = megatron.setup(row)
        if asked[0].parameter_count > megatron.LARGE:
            ours = next(r for r in memory(*asked) if r.stage.head).allocated_bytes
            published = float(row["max_allocated_bytes"])
            found["Megatron-LM CI, 7B and up"].append((*asked, bloom.GPU, published, ours))
    return found


def compare_peers() -> list[PeerError]:
    """Every installed tool and this planner, on the same rows."""
    found = []
    for source, asked in rows().items():
        found.append(error_of(source, "this planner", [ours / said for *_, said, ours in asked]))
        for name, tool in TOOLS.items():
            with contextlib.suppress(ImportError):
                found.append(error_of(source, name, list(_ask(tool, asked))))
    return found


def _ask(tool: Tool, asked: list[Asked]) -> Iterator[float]:
    """Predicted over published, on the rows that the tool accepts."""
    for model, plan, batch, gpu, published, _ in asked:
        with contextlib.suppress(AssertionError):
            yield tool(model, plan, batch, gpu) / published


def error_of(source: str, tool: str, ratios: list[float]) -> PeerError:
    """Errors of one tool, from its figures over the true ones."""
    errors = [ratio - 1 for ratio in ratios]
    median = statistics.median(abs(error) for error in errors)
    return PeerError(source, tool, len(errors), median, statistics.median(errors))
