"""Megatron-LM's own CI: exact allocated and peak bytes of the last pipeline stage."""

from __future__ import annotations

from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import number, table, whole
from utils.catalog import ModelShape
from utils.planner import Batch, Framework, Plan, framework, memory

LARGE = 6.5e9
# fused_cross_entropy.py: its compiled functions keep the float32 logits and their exponentials
# beside the logits, where the unfused loss works in place.
FUSED_LOSS_BYTES = 10
DEFERRED_HEADS = 2  # --wgrad-deferral-limit of these tests' model_config.yaml

# Dense rows of the CI that are not in the table, and why.
LEFT_OUT = {
    "bert, t5, hybrid, mimo": "other architectures",
    "mla": "multi-latent attention",
    "tunable_overlap": "5 micro-batches over 4 interleaved stages, in a schedule of its own",
    "uneven_pipeline": "its layers a stage are in no column",
    "account_for_embedding_loss_in_pipeline_split": "embedding and loss as layers of chunks",
    "modelopt_distill": "a teacher beside the model",
    "fsdp": "Megatron's own FSDP",
    "fp8": "8-bit products of tiny models",
    "grpo, inference": "not a training step alone",
}


def comparisons() -> list[Comparison]:
    """Bytes between steps and at the peak, of large and small dense GPT models."""
    rows = []
    for row in table("megatron_golden"):
        model, plan, batch = setup(row)
        last = next(r for r in memory(model, plan, batch) if r.stage.head)
        size = "7B and up" if model.parameter_count > LARGE else "small"
        source = f"Megatron-LM CI, {size}"
        case = f"{row['test_case'].removeprefix('gpt/')} on {row['platform']}"
        for quantity, column, bytes_ in (
            ("bytes between steps", "allocated_bytes_last", last.lasting_bytes),
            ("peak bytes", "max_allocated_bytes", last.allocated_bytes),
        ):
            published = number(row[column])
            if published:
                rows.append(Comparison(source, quantity, case, published, bytes_, last.parameters))
    return rows


def setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    """Model, plan and batch of one row."""
    return _model(row), _plan(row), _batch(row)


def _model(row: dict[str, str]) -> ModelShape:
    hidden, gated = whole(row["hidden_size"]), row["swiglu"] == "True"
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    inner = whole(row["ffn_hidden_size"], usual)
    return ModelShape(
        name=row["test_case"],
        family="llama" if gated else "gpt",
        layers=whole(row["num_layers"]),
        hidden=hidden,
        heads=whole(row["num_attention_heads"]),
        kv_heads=whole(row["num_query_groups"], 0) or None,
        feedforward=inner,
        vocabulary=whole(row["vocab_size"], 50257),
        max_sequence=whole(row["seq_length"], 1024),
        positions="rotary" if row["position_embedding_type"] == "rope" else "learned",
        tied=row["untie_embeddings_and_output_weights"] != "True",
    )


def _plan(row: dict[str, str]) -> Plan:
    tp = whole(row["tensor_model_parallel_size"])
    pp = whole(row["pipeline_model_parallel_size"])
    cp = whole(row["context_parallel_size"])
    unfused = row["attention_backend"] in ("unfused", "local") or row["transformer_impl"] == "local"
    dp = whole(row["n_gpus"]) // (tp * pp * cp)
    instances = 2 if "multi_dist_optimizer_instances" in row["test_case"] else 1
    return Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        shard_ranks=dp * cp // instances,
        virtual_stages=_virtual_stages(row, pp),
        micro_batch=whole(row["micro_batch_size"]),
        sequence_parallel=row["sequence_parallel"] == "True" and tp > 1,
        zero_stage=1 if row["use_distributed_optimizer"] == "True" else 0,
        dropout=row["hidden_dropout"] == "",
        attention="unfused" if unfused else "flash",
        recompute="full" if row["recompute_granularity"] == "full" else "none",
        framework=_rules(row),
    )


def _rules(row: dict[str, str]) -> Framework:
    """Megatron's, with what the row switches: padding, fused additions of gradients, fused loss.

    The "lts" containers hold a Transformer Engine from before the stand-ins.
    """
    rules = framework("megatron")
    fused_additions = row["no_gradient_accumulation_fusion"] != "True"
    engine = row["transformer_impl"] == "transformer_engine" and "lts" not in row["platform"]
    fused_loss = row["cross_entropy_loss_fusion"] == "True"
    return replace(
        rules,
        vocabulary_multiple=whole(row["make_vocab_size_divisible_by"], 128),
        dummy_gradients=fused_additions and engine,
        loss_bytes=FUSED_LOSS_BYTES if fused_loss else rules.loss_bytes,
        deferred_heads=DEFERRED_HEADS if "defer_embedding_wgrad" in row["test_case"] else 0,
    )


def _virtual_stages(row: dict[str, str], pp: int) -> int:
    layers = whole(row["num_layers_per_virtual_pipeline_stage"], 0)
    if layers:
        return whole(row["num_layers"]) // pp // layers
    return whole(row["num_virtual_stages_per_pipeline_rank"])


def _batch(row: dict[str, str]) -> Batch:
    return Batch(
        sequences=whole(row["global_batch_size"], 32),
        sequence_length=whole(row["seq_length"], 1024),
    )
