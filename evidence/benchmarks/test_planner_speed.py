"""The planner: one estimate, and the search over 1,024 GPUs."""

import time

from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Plan, estimate, search

MODEL = model_shape("megatron-175b")
BATCH = Batch(sequences=2048, sequence_length=2048)


def test_search_over_1024_gpus(report):
    start = time.perf_counter()
    search(MODEL, Cluster(gpu="A100-80GB", nodes=128), BATCH)
    report("search, 175B on 1,024 GPUs", time.perf_counter() - start, 2.0)


def test_search_over_1024_gpus_with_experts_and_long_sequences(report):
    batch = Batch(sequences=1024, sequence_length=32_768)
    start = time.perf_counter()
    search("mixtral-8x22b", Cluster(gpu="H100", nodes=128), batch)
    report("search, 8x22B at 32k on 1,024 GPUs", time.perf_counter() - start, 2.0)


def test_estimate(report):
    cluster, plan = Cluster(gpu="A100-80GB", nodes=8), Plan(tp=8, pp=8)
    start = time.perf_counter()
    for _ in range(100):
        estimate(MODEL, cluster, plan, BATCH)
    report("one estimate", (time.perf_counter() - start) / 100, 0.01)
