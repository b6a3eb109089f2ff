"""Megatron-LM's own CI on mixtures of experts: bytes between steps and at the peak.

Rows that the planner cannot say are left out and counted: `left_out` has the reasons.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import number, table, whole
from utils.catalog import ModelShape
from utils.planner import Batch, Plan, memory
from utils.planner.frameworks import framework

SOURCE = "Megatron-LM CI, experts"
REASONS = {
    "multi_latent_attention": "latent attention, whose ranks the table does not have",
    "optimizer": "Muon, which keeps one moment for matrices and two for the rest",
    "hybrid_layer_pattern": "state-space layers between the blocks",
    "use_megatron_fsdp": "Megatron-FSDP, whose buffers of experts are its own",
}


def comparisons() -> list[Comparison]:
    """Every row that the planner can say; no constant was set on them."""
    rows = []
    for row in table("megatron_experts"):
        if reason(row):
            continue
        model, plan, batch = setup(row)
        last = memory(model, plan, batch)[-1]
        case = f"{row['test_case'].partition('/')[2]} on {row['platform']}"
        for quantity, column, bytes_ in (
            ("bytes between steps", "allocated_bytes_last", last.lasting_bytes),
            ("peak bytes", "max_allocated_bytes", last.allocated_bytes),
        ):
            published = number(row[column])
            if published:
                rows.append(Comparison(SOURCE, quantity, case, published, bytes_, last.parameters))
    return rows


def left_out() -> dict[str, int]:
    """Rows that are not compared, by reason."""
    counts: dict[str, int] = {}
    for row in table("megatron_experts"):
        why = reason(row)
        if why:
            counts[why] = counts.get(why, 0) + 1
    return counts


def reason(row: dict[str, str]) -> str:
    """Why the planner cannot say a row; empty where it can."""
    found = (text for column, text in REASONS.items() if row[column] not in ("", "False", "adam"))
    return next(found, "")


def setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    """Model, plan and batch of one row."""
    batch = Batch(
        sequences=whole(row["global_batch_size"], 32),
        sequence_length=whole(row["seq_length"], 1024),
    )
    return _model(row), _plan(row), batch


def _model(row: dict[str, str]) -> ModelShape:
    hidden, gated = whole(row["hidden_size"]), row["swiglu"] == "True"
    inner = whole(row["ffn_hidden_size"], 4 * hidden)
    dense = re.match(r"\(\[0\]\*(\d+)", row["moe_layer_freq"])
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
        num_experts=whole(row["num_experts"]),
        experts_per_token=whole(row["moe_router_topk"], 2),
        expert_feedforward=whole(row["moe_ffn_hidden_size"], inner),
        shared_feedforward=whole(row["moe_shared_expert_intermediate_size"], 0),
        dense_layers=int(dense.group(1)) if dense else 0,
    )


def _plan(row: dict[str, str]) -> Plan:
    tp, pp = whole(row["tensor_model_parallel_size"]), whole(row["pipeline_model_parallel_size"])
    cp = whole(row["context_parallel_size"])
    multiple = whole(row["make_vocab_size_divisible_by"], 128)
    return Plan(
        dp=whole(row["n_gpus"]) // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=whole(row["expert_model_parallel_size"]),
        expert_tp=whole(row["expert_tensor_parallel_size"], tp),
        micro_batch=whole(row["micro_batch_size"]),
        sequence_parallel=row["sequence_parallel"] == "True" and tp > 1,
        zero_stage=1 if row["use_distributed_optimizer"] == "True" else 0,
        dropout=row["hidden_dropout"] == "",
        attention="unfused" if _unfused(row) else "flash",
        framework=replace(framework("megatron"), vocabulary_multiple=multiple),
    )


def _unfused(row: dict[str, str]) -> bool:
    """Said so; or the older container in deterministic mode, whose flash attention has none."""
    said = row["attention_backend"] in ("unfused", "local") or row["transformer_impl"] == "local"
    older = row["platform"].startswith("lts") and row["deterministic_mode"] == "True"
    return said or (older and not row["attention_backend"])
