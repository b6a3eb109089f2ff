"""What other tools say of the same rows: memory of one GPU, by formulas they publish as code.

None of them is needed here. Those that are installed (`pip install deepspeed accelerate
llm-analysis megatron-bridge`) are asked, the others are left out of the table. Where a tool knows no model
parallelism it is given the parameters of one model-parallel rank, which is the kindest reading.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from evidence.validation import b200, bloom, megatron, ultrascale
from evidence.validation.tables import number, table
from utils.catalog import Device, ModelShape, device
from utils.planner import Batch, Plan, memory, worst
from utils.planner.stages import block_parameters, padded_vocabulary
from utils.units import GB, GIB


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
        name=model.name,
        num_layers=model.layers,
        n_head=model.heads,
        hidden_dim=model.hidden,
        vocab_size=model.vocabulary,
        max_seq_len=batch.sequence_length,
        num_key_value_heads=model.key_value_heads,
        ffn_embed_dim=model.feedforward,
        expansion_ratio=model.feedforward / model.hidden,
    )
    card = config.GPUConfig(gpu.name, gpu.memory_gb, 2000, 300, 1e-5, 312)
    split = config.ParallelismConfig(
        plan.tp, plan.pp, plan.dp, sp_size=plan.tp if plan.sequence_parallel else 1
    )
    recompute = analysis.ActivationRecomputation[plan.recompute.upper()]
    zero = analysis.DSZeRO[f"STAGE_{plan.zero_stage}" if plan.zero_stage else "NONE"]
    answer = analysis.LLMAnalysis(
        shape, card, parallelism_config=split, flops_efficiency=0.5
    ).training(
        batch_size_per_gpu=plan.micro_batch,
        seq_len=batch.sequence_length,
        gradient_accumulation_steps=plan.micro_batches(batch),
        activation_recomputation=recompute,
        ds_zero=zero,
        flash_attn=plan.attention == "flash",
        softmax_dropout=plan.dropout,
        mlp_gated_linear_units=model.family == "llama",
    )
    return answer["(weight+op_state+grad+act)_memory_per_gpu"]


def megatron_bridge_bytes(model: ModelShape, plan: Plan, batch: Batch, gpu: Device) -> float:
    """Megatron-Bridge's theoretical_memory_utils: states of the fullest rank, and activations.

    Its formula of activations assumes sequence parallelism and no scores kept; it is added for
    every row, which is the kindest reading.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module("megatron.bridge.training.utils.theoretical_memory_utils")
    interleaved = plan.virtual_stages if plan.virtual_stages > 1 else None
    shape = SimpleNamespace(
        kv_channels=model.head_dim,
        num_attention_heads=model.heads,
        hidden_size=model.hidden,
        num_query_groups=model.key_value_heads,
        num_moe_experts=None,
        num_layers=model.layers,
        gated_linear_unit=model.family == "llama",
        ffn_hidden_size=model.feedforward,
        activation_func=getattr(module.F, "silu", None),
        seq_length=batch.sequence_length // plan.cp,
        share_embeddings_and_output_weights=model.tied,
        should_pad_vocab=False,
        vocab_size=padded_vocabulary(model, plan),
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=interleaved,
    )
    asked = SimpleNamespace(
        model=shape,
        train=SimpleNamespace(micro_batch_size=plan.micro_batch),
        optimizer=SimpleNamespace(use_distributed_optimizer=plan.zero_stage > 0),
        data_parallel_size=plan.dp,
    )
    states = module.compute_weight_and_optimizer_memory(asked)
    return states + module.compute_activation_memory(asked, plan.micro_batches(batch))


Tool = Callable[[ModelShape, Plan, Batch, Device], float]
TOOLS: dict[str, Tool] = {
    "DeepSpeed estimator": deepspeed_bytes,
    "accelerate estimate-memory": accelerate_bytes,
    "llm-analysis": llm_analysis_bytes,
    "Megatron-Bridge": megatron_bridge_bytes,
}
Asked = tuple[ModelShape, Plan, Batch, Device, float, float]


def rows() -> dict[str, list[Asked]]:
    """Model, plan, batch, device, published and our bytes, by source."""
    found: dict[str, list[Asked]] = {
        "Ultra-Scale sweep": [],
        "BLOOM prequel": [],
        "Megatron-LM CI, 7B and up": [],
        "SimuMax's B200": [],
    }
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
    for _, row in b200.rows():
        model, cluster, plan, batch = b200.setup(row)
        ours = worst(memory(model, plan, batch)).allocated_bytes
        published = float(row["real_alloc_gib"]) * GIB
        found["SimuMax's B200"].append((model, plan, batch, cluster.device, published, ours))
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
