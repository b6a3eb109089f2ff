"""Bad input to the memory of a plan, each with the rule; and the nearest sizes that would do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import BATCH, GPT

from utils.planner import Batch, Cluster, Lora, Plan, framework, network
from utils.planner.adapters import adapter_parameters
from utils.rules import nearest_divisors


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plan(tp=0), "tp is 0"),
        (lambda: Plan(framework="megatorn"), "megatorn"),
        (lambda: replace(framework("fsdp"), shards="layer"), "shards is 'layer'"),
        (lambda: Plan(zero_stage=4), "zero_stage is 4"),
        (lambda: Plan(recompute="some"), "'selective'"),
        (lambda: Plan(recompute=True), "True; write one of 'none', 'selective', 'full'"),
        (lambda: Plan(offload=True), "True; write one of 'none', 'optimizer', 'parameters'"),
        (lambda: Plan(zero_stage="3"), "write one of 0, 1, 2, 3"),
        (lambda: Plan(virtual_stages=2), "Write 1"),
        (lambda: Plan(sequence_parallel=True), "tp=2"),
        (lambda: Plan(offload="parameters"), "zero_stage=3"),
        (lambda: Plan(dp=8, shard_ranks=3), "Nearest that does: 2 or 4"),
        (lambda: Plan(tp=3).check(GPT, BATCH), "Nearest that does: 2 or 4"),
        (lambda: Plan(dp=3).check(GPT, BATCH), "2 or 4"),
        (lambda: Plan(micro_batch=65).check(GPT, BATCH), "Largest micro_batch here: 64"),
        (lambda: Plan(dp=128).check(GPT, BATCH), "lower dp"),
        (lambda: Plan(pp=64).check(GPT, BATCH), "Largest pp: 36"),
        (lambda: Plan(pp=8, virtual_stages=2).check(GPT, BATCH), "36"),
        (lambda: Plan(pp=6, virtual_stages=2).check(GPT, BATCH), "micro-batches"),
        (lambda: Plan(cp=3).check(GPT, BATCH), "sequence_length"),
        (lambda: Batch(sequences=0, sequence_length=1), "sequences is 0"),
        (lambda: Lora(base="fp4"), "'nf4'"),
        (lambda: Lora(targets=("query",)), "'q'"),
        (lambda: adapter_parameters(GPT, Lora(targets=("gate",))), "megatron-7.5b"),
        (lambda: Cluster(gpu="A1000", nodes=1), "A100-80GB"),
        (lambda: Cluster(gpu="H100", nodes=0), "nodes is 0"),
        (
            lambda: Cluster(gpu="H100", nodes=1, usd_per_gpu_hour=-1),
            "usd_per_gpu_hour is -1; it must be 0 or more",
        ),
    ],
)
def test_bad_input_is_refused_with_the_rule(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Batch(sequences=4e6 / 2048, sequence_length=2048),
            "1953.125.*Nearest: 1953 or 1954",
        ),
        (lambda: Batch(sequences=math.nan, sequence_length=1), "sequences is nan.*whole number"),
        (lambda: Batch(sequences=math.inf, sequence_length=1), "sequences is inf.*whole number"),
        (lambda: Batch(sequences=0.4, sequence_length=1), "Nearest: 1"),
        (lambda: Batch(sequences=8, sequence_length=True), "sequence_length is True"),
        (lambda: Plan(dp="8"), "dp is '8'.*without quotes: 8"),
        (lambda: Plan(tp=None), "tp is None.*whole number"),
        (lambda: Plan(shard_ranks=0), "shard_ranks is 0"),
        (lambda: Plan(lora=8), "lora is 8; it must be of type Lora or None"),
        (lambda: Plan(framework=3), "framework is 3; it must be of type Framework or str"),
        (lambda: Lora(rank=1.5), "rank is 1.5"),
        (lambda: Cluster(gpu=None, nodes=1), "gpu is None; it must be of type Device or str"),
        (lambda: Cluster(gpu="H100", nodes="2"), "without quotes: 2"),
        (lambda: Cluster(gpu="H100", nodes=1, usd_per_gpu_hour="3"), "without quotes: 3"),
        (lambda: Cluster(gpu="H100", nodes=1, network_bytes_per_second=math.nan), "is nan"),
        (lambda: network("InfiniBand HDR", 1.5), "ports is 1.5"),
    ],
)
def test_what_is_no_count_is_refused_with_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_whole_floats_and_numpy_counts_are_integers():
    batch = Batch(sequences=4e6 // 2048, sequence_length=np.int64(2048))
    assert (batch, type(batch.sequences), type(batch.sequence_length)) == (
        Batch(sequences=1953, sequence_length=2048),
        int,
        int,
    )
    assert Plan(dp=8.0) == Plan(dp=8) and type(Plan(dp=np.float32(8)).dp) is int


def test_nearest_divisors_of_a_large_prime_take_no_time():
    prime = 10**12 - 11
    assert nearest_divisors(prime, 8) == (1, prime)
    assert nearest_divisors(2 * (10**9 + 7), 3) == (2, 10**9 + 7)
    with pytest.raises(ValueError, match=f"Nearest that does: 1 or {prime}"):
        Plan(dp=8).check(GPT, Batch(sequences=prime, sequence_length=2048))


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360, 1024])
def test_nearest_divisors_are_those_of_trying_all(number):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for wanted in range(1, number + 3):
        below, above = nearest_divisors(number, wanted)
        assert below == max(d for d in divisors if d <= wanted)
        assert above == min((d for d in divisors if d >= wanted), default=None)
