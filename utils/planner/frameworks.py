"""The conventions of each framework.

Every figure is read off the framework's own code, or off a measurement where `source` says so.
"""

from __future__ import annotations

from dataclasses import replace

from utils.catalog.lookup import find
from utils.planner import calibration
from utils.planner.conventions import Framework
from utils.planner.launches import EAGER

_BF16 = Framework(
    name="bf16", recompute_stops_early=True, launches=EAGER,
    frees_gradients=True, step_gradient_bytes=2,
    gradient_bytes=2, master_bytes=0, moment_bytes=4, fused_gate=False,
    flash_generation=2, loss_bytes=14, vocabulary_multiple=1, eager_norm=True,
    source="Plain PyTorch with the whole model and its optimizer in bfloat16",
)  # fmt: skip

_MEGATRON = Framework(
    name="megatron", dummy_gradients=True, overlap_tensor=True, hides_sends=True, fp8_parameters=True,
    host_seconds=calibration.HOST_SECONDS,
    source="Megatron-LM: float32 main gradients, float32 main parameters and moments in "
    "distrib_optimizer.py; logits cast to float32 in cross_entropy.py, in place after that; sends hidden unless "
    "--no-overlap-p2p-communication says otherwise (arguments.py); fp8 with --fp8-param-gather, as "
    "every fp8 recipe of Megatron-Bridge has it (training/mixed_precision.py)",
)  # fmt: skip

_ROWS = [
    Framework(
        name="zero-paper", gradient_bytes=2,
        source="Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1: 2 + 2 + K, K = 12",
    ),
    _MEGATRON,
    replace(
        _MEGATRON, name="megatron-bridge", gradient_bytes=2, reduce_bytes=2, step_gradient_bytes=4,
        source="NVIDIA-NeMo/Megatron-Bridge, perf_recipes/_common.py at 067f987: gradients kept and "
        "reduced in 16 bits (grad_reduce_in_fp32=False) and copied to float32 for the rank's share of "
        "the step; the recipes' loss is fused, which the plan says",
    ),
    Framework(
        name="internevo", gradient_bytes=2, step_gradient_bytes=4, reduce_bytes=2,
        bucket_size_bytes=512e6, whole_gradients=True, broadcasts=True, flash_generation=2,
        fused_gate=False, loss_bytes=14, vocabulary_multiple=1,
        source="InternLM's hybrid_zero_optim.py: gradients of a bucket of 512 MiB all-reduced in 16 "
        "bits over all replicas, parameters broadcast by the rank that holds their block "
        "(utils.py, ParamBcastSyncHandler)",
    ),
    Framework(
        name="megatron-deepspeed-fp16", gradient_bytes=2, step_gradient_bytes=4,
        fixed_buffer_bytes=2e9, loss_bytes=10, reduce_bytes=2,
        bucket_size_bytes=1e9, overlap_gradients=False, overlap_parameters=False,
        host_seconds=calibration.HOST_SECONDS, host_exposed=True, accumulate_bytes=6,
        source="Megatron-DeepSpeed with DeepSpeed's stage_1_and_2.py: float16 gradients, a "
        "float32 copy of the partition's gradient at the step, buckets of 5e8 elements",
    ),
    Framework(
        name="megatron-deepspeed-bf16", gradient_bytes=6, fixed_buffer_bytes=3e9, loss_bytes=10,
        bucket_size_bytes=1e9, overlap_gradients=False, overlap_parameters=False,
        host_seconds=calibration.HOST_SECONDS, host_exposed=True, accumulate_bytes=14,
        source="DeepSpeed's bf16_optimizer.py: float32 gradients, and the bfloat16 ones are "
        "zeroed after they are added, not freed; buckets of 5e8 elements, float32 to reduce",
    ),
    Framework(
        name="nanotron", bucket_bytes=2, backward_gradient_bytes=2, fused_gate=False,
        flash_generation=2, overlap_tensor=True, loss_bytes=10, vocabulary_multiple=1,
        bucket_size_bytes=25e6,
        overlap_parameters=False, host_seconds=calibration.HOST_SECONDS, host_meets_stages=True,
        accumulate_bytes=10, shards="tensor",
        source="nanotron: optim/zero.py, p2p.py, gradient_accumulator.py (float32 gradients of all "
        "parameters), DistributedDataParallel buckets in bfloat16, tensor_parallel/functional.py",
    ),
    Framework(
        name="deepspeed", gradient_bytes=2, step_gradient_bytes=4, fixed_buffer_bytes=2e9,
        offloaded_gradient_bytes=4,
        flash_generation=2, reduce_bytes=2, bucket_size_bytes=1e9, overlap_gradients=False,
        one_port=True, launches=EAGER, whole_gradients=True,
        fused_gate=False,
        loss_bytes=14, vocabulary_multiple=1, eager_norm=True,
        source="DeepSpeed's stage_1_and_2.py and stage3.py at 0.19.8: stages 1 and 2 all-reduce each "
        "bucket (use_multi_rank_bucket_allreduce, on by default); one port: the time that does not "
        "move from 768 to 1,536 GPUs in Narayanan et al. 2021, Table 2",
    ),
    Framework(
        name="fsdp", recompute_stops_early=True, launches=EAGER,
        keeps_ends=True, shards="block", frees_gradients=True, step_gradient_bytes=4,
        offloaded_gradient_bytes=4, parameter_bytes=4, gradient_bytes=4, master_bytes=0, gathered_bytes=2,
        flash_generation=2, fused_gate=False, loss_bytes=14, vocabulary_multiple=1, eager_norm=True,
        source="PyTorch FSDP2 with MixedPrecisionPolicy(bf16, reduce fp32): float32 shards are "
        "master and parameter in one",
    ),
    Framework(
        name="fp32", recompute_stops_early=True, launches=EAGER,
        eager_norm=True, frees_gradients=True, step_gradient_bytes=4,
        parameter_bytes=4, gradient_bytes=4, master_bytes=0, gathered_bytes=4,
        flash_generation=2, residual_bytes=4, fused_gate=False, loss_bytes=16,
        vocabulary_multiple=1, source="Plain PyTorch, everything in float32",
    ),
    _BF16,
    replace(_BF16, name="transformers",
            source="transformers' models in bfloat16, trained by plain PyTorch or its Trainer"),
    replace(_BF16, name="litgpt", loss_bytes=8,
            source="litgpt's finetune/lora.py at 8641822: head and loss in chunks of 128 tokens, of "
            "which the logits, in float32 by Fabric's convert_output, and their log-softmax stay"),
    replace(_BF16, name="peft",
            source="peft's adapters on transformers' models in bfloat16; their own type is the Lora's"),
]  # fmt: skip

FRAMEWORKS: dict[str, Framework] = {row.name: row for row in _ROWS}


def framework(name: str) -> Framework:
    """The conventions called `name`: `framework("megatron")`.

    Raises:
        ValueError: no such framework; the sentence gives the nearest names.
    """
    return find(FRAMEWORKS, name, "framework")
