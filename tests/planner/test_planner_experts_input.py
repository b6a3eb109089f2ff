"""Plans with experts and few bits that contradict themselves, each with a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner_experts import H100, LLAMA, LONG, MIXTRAL

from utils.planner import Batch, Cluster, Plan, estimate
from utils.planner.plan_context import PlanContext
from utils.planner.stage_bytes.states import host_bytes
from utils.planner.stages import stages

# What cannot be


@pytest.mark.parametrize(
    ("model", "plan", "sentence"),
    [
        (
            MIXTRAL,
            Plan(dp=24, ep=3),
            "ep is 3 and does not divide 8 .experts of mixtral-8x7b.*2 or 4",
        ),
        (LLAMA, Plan(dp=8, ep=2), "llama-2-7b has no experts. Write ep=1"),
        (
            MIXTRAL,
            Plan(dp=64, precision="mxfp8"),
            "H100 .capability 9.0. has no units.*'fp8', or take B200",
        ),
        (
            LLAMA,
            Plan(
                dp=64,
                cp=1,
                tp=1,
                partition=(32,),
                pp=1,
                recompute="full",
                recompute_layers=4,
                optimizer_in_backward=True,
            ),
            "one micro-batch a step, and this plan has 4.*64 sequences",
        ),
        (LLAMA, Plan(dp=16, pp=4, partition=(8, 8, 8, 9)), "deals 33 layers to 4 stages"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(model, plan, sentence) -> None:
    nodes = -(-plan.ranks // 8)
    with pytest.raises(ValueError, match=sentence):
        estimate(
            model,
            replace(H100, nodes=nodes),
            plan,
            Batch(sequences=256 if plan.ranks != 24 else 240, sequence_length=4096),
        )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dp": 4, "ep": 8}, "ep . expert_tp is 8 and does not divide 4"),
        ({"recompute_layers": 4}, "Write recompute='full'"),
        ({"optimizer_in_backward": True, "zero_stage": 1}, "Write zero_stage=0"),
        ({"overlap_tp": True}, "tp is 1"),
        ({"pp": 2, "partition": (1.5, 2)}, "item 0 of tuple is not an instance of int"),
        ({"pp": 2, "partition": [1, 2]}, r"write a tuple: \(1, 2\)"),
        ({"precision": "fp4"}, "'bf16', 'fp8', 'mxfp8'"),
        ({"loss": "half"}, "'whole', 'fused', 'chunked'"),
    ],
)
def test_plans_that_contradict_themselves(fields, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Plan(**fields)


def test_a_sequence_that_cp_does_not_divide() -> None:
    with pytest.raises(ValueError, match="cp is 3 and does not divide 4096"):
        estimate(
            LLAMA,
            replace(H100, nodes=3),
            Plan(dp=8, cp=3),
            Batch(sequences=8, sequence_length=4096),
        )


def test_fp8_on_a_card_without_it() -> None:
    with pytest.raises(ValueError, match="A100-80GB .capability 8.0. has no units.*'bf16'.*H100"):
        estimate(LLAMA, Cluster(gpu="A100-80GB", nodes=1), Plan(dp=8, precision="fp8"), LONG)


def test_a_host_without_the_memory_that_offload_needs() -> None:
    small = Cluster(gpu="A100-80GB", nodes=1, host_memory_bytes=64e9)
    plan = Plan(dp=8, zero_stage=1, offload="optimizer")
    assert host_bytes(PlanContext(LLAMA, plan, LONG), stages(LLAMA, plan)[0]) > 0
    with pytest.raises(
        ValueError, match="Offload puts .* GiB into the memory of each node, which has 59.60"
    ):
        estimate(LLAMA, small, plan, LONG)
    assert estimate(LLAMA, replace(small, host_memory_bytes=2e12), plan, LONG).fits


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"usd_per_gpu_hour": 0}, "usd_per_gpu_hour is 0; it must be above 0"),
        (
            {"usd_per_gpu_hour": 1.25, "pricing": "spot"},
            r"A spot price of \$1.25 needs interruptions",
        ),
        ({"pricing": "free"}, "'on demand', 'reserved', 'spot'"),
    ],
)
def test_prices_that_are_none(fields, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cluster(gpu="H100", nodes=1, **fields)
