"""LoRA and QLoRA peaks: litgpt's tables and PEFT's method comparison."""

from __future__ import annotations

from evidence.validation.comparison import Comparison
from evidence.validation.tables import number, table, whole
from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Lora, Plan, StageMemory, memory
from utils.units import GB

# config.json of microsoft/phi-1_5, stabilityai/stablelm-base-alpha-3b, tiiuae/falcon-40b and
# meta-llama/Llama-3.2-3B; vocabularies as litgpt pads them.
PHI = ModelShape(name="phi-1.5", family="gpt", layers=24, hidden=2048, heads=32, feedforward=8192,
                 vocabulary=51_200, max_sequence=2048, parallel_residual=True)  # fmt: skip
STABLELM = ModelShape(name="stablelm-alpha-3b", family="gpt", layers=16, hidden=4096, heads=32,
                      feedforward=16_384, vocabulary=50_688, max_sequence=4096, parallel_residual=True)  # fmt: skip
FALCON_40B = ModelShape(name="falcon-40b", family="gpt", layers=60, hidden=8192, heads=128,
                        kv_heads=8, feedforward=32_768, vocabulary=65_024, max_sequence=2048,
                        tied=True, parallel_residual=True)  # fmt: skip
FALCON_7B = ModelShape(name="falcon-7b", family="gpt", layers=32, hidden=4544, heads=71, kv_heads=1,
                       feedforward=18_176, vocabulary=65_024, max_sequence=2048,
                       tied=True, parallel_residual=True)  # fmt: skip
LLAMA_32_3B = ModelShape(name="llama-3.2-3b", family="llama", layers=28, hidden=3072, heads=24,
                         kv_heads=8, feedforward=8192, vocabulary=128_256, max_sequence=131_072,
                         tied=True)  # fmt: skip

# (litgpt's model, its size) -> shape and the longest example of the data set, in tokens.
LITGPT = {
    ("phi-1.5", "1.3 B"): (PHI, 1044),
    ("StableLM Alpha", "3 B"): (STABLELM, 1034),
    ("Llama 2", "7 B"): (model_shape("llama-2-7b"), 1304),
    ("Llama 2 13B", "13 B"): (model_shape("llama-2-13b"), 1304),
    ("Falcon", "7 B"): (FALCON_7B, 1079),
    ("Falcon", "40 B"): (FALCON_40B, 1079),
}
BASES = {"None": "bf16", "bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-dq"}


def comparisons() -> list[Comparison]:
    """Peaks of litgpt on one GPU (allocated GB) and of PEFT (reserved GB)."""
    rows = []
    for row in table("litgpt_adapters"):
        published = number(row["max_gpu_ram_gb"])
        is_known = (row["model"], row["size"]) in LITGPT
        if published and row["gpu"] == "1 x A100" and is_known:
            held = litgpt_memory(row)
            case = f"{row['model']} {row['size']} {row['quantization']} mbs{row['micro_batch']}"
            rows.append(Comparison("litgpt LoRA and QLoRA", "peak GB", case, published,
                                   held.allocated_bytes / GB, held.parameters))  # fmt: skip
    for line, row in enumerate(table("peft_adapters")):
        if row["peft_type"] == "LORA":
            held = peft_memory(row)
            rows.append(Comparison("PEFT LoRA", "reserved GB", row["experiment"],
                                   float(row["memory_max_bytes"]) / GB, held.reserved_bytes / GB,
                                   held.parameters, line % 2 == 0))  # fmt: skip
    return rows


def litgpt_memory(row: dict[str, str]) -> StageMemory:
    """litgpt's LoRA of query and value, everything in bfloat16, bitsandbytes 0.41.1."""
    model, length = LITGPT[row["model"], row["size"]]
    lora = Lora(
        rank=8, targets=("q", "v"), base=BASES[row["quantization"]], adapter_bytes=2,
        quantized_head=True, adapter_dropout=True, keeps_inputs=True, fused=True,
    )  # fmt: skip
    size = whole(row["micro_batch"])
    plan = Plan(micro_batch=size, framework="litgpt", lora=lora)
    return memory(model, plan, Batch(sequences=size, sequence_length=length))[0]


def peft_memory(row: dict[str, str]) -> StageMemory:
    """PEFT's LoRA: float32 adapters on a bfloat16 base, batches of the longest sequence."""
    plan = Plan(micro_batch=whole(row["batch_size"]), framework="bf16",
                lora=Lora(rank=whole(row["r"]), targets=("q", "v")))  # fmt: skip
    batch = Batch(sequences=plan.micro_batch, sequence_length=whole(row["max_seq_len"]))
    return memory(LLAMA_32_3B, plan, batch)[0]
