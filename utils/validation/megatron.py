"""Megatron-LM's own CI: exact allocated and peak bytes of the last pipeline stage."""

from __future__ import annotations

from dataclasses import replace

from utils.catalog import ModelShape
from utils.planner import Batch, Plan, memory
from utils.planner.frameworks import framework
from utils.validation.comparison import Comparison
from utils.validation.tables import number, table, whole

LARGE = 6.5e9


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
        name=row["test_case"], family="llama" if gated else "gpt",
        layers=whole(row["num_layers"]), hidden=hidden, heads=whole(row["num_attention_heads"]),
        kv_heads=whole(row["num_query_groups"], 0) or None, feedforward=inner,
        vocabulary=whole(row["vocab_size"], 50257), max_sequence=whole(row["seq_length"], 1024),
        positions="rotary" if row["position_embedding_type"] == "rope" else "learned",
        tied=row["untie_embeddings_and_output_weights"] != "True",
    )  # fmt: skip


def _plan(row: dict[str, str]) -> Plan:
    tp = whole(row["tensor_model_parallel_size"])
    pp = whole(row["pipeline_model_parallel_size"])
    cp = whole(row["context_parallel_size"])
    unfused = row["attention_backend"] in ("unfused", "local") or row["transformer_impl"] == "local"
    multiple = whole(row["make_vocab_size_divisible_by"], 128)
    return Plan(
        dp=whole(row["n_gpus"]) // (tp * pp * cp), tp=tp, pp=pp, cp=cp,
        virtual_stages=_virtual_stages(row, pp), micro_batch=whole(row["micro_batch_size"]),
        sequence_parallel=row["sequence_parallel"] == "True" and tp > 1,
        zero_stage=1 if row["use_distributed_optimizer"] == "True" else 0,
        dropout=row["hidden_dropout"] == "", attention="unfused" if unfused else "flash",
        recompute="full" if row["recompute_granularity"] == "full" else "none",
        framework=replace(framework("megatron"), vocabulary_multiple=multiple),
    )  # fmt: skip


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
