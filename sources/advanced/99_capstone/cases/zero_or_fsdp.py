"""Case "zero_or_fsdp": which library and which stage for two jobs, by need and bytes sent."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import scored
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import Batch, Cluster, Estimate, Plan, axis_bytes, estimate
from utils.units import format_bytes

from .plans import estimated, gigabytes, plan_kind, plan_name_of, room
from .sheet import Gains, Sheet

NEEDS = {
    "deepspeed": "the script stays as it is: one configuration file, and the states may go to NVMe later",
    "fsdp": "tensor parallelism on the same mesh is next, torch.compile is on, checkpoints are DTensors",
}


@dataclass(frozen=True)
class ShardedJob:
    """One job: its model, its machines, and what else it needs."""

    model: str
    cluster: Cluster
    batch: Batch
    library: str

    @property
    def needs(self) -> str:
        """Beside memory and bytes."""
        return NEEDS[self.library]


@dataclass(frozen=True)
class TwoJobs:
    """The jobs of a seed, "A" and "B"."""

    jobs: Mapping[str, ShardedJob]

    def __str__(self) -> str:
        rows = []
        for name, job in self.jobs.items():
            alone = estimate(
                job.model, job.cluster, Plan(dp=job.cluster.gpus, framework="zero-paper"), job.batch
            )
            rows += [
                f"Job {name}: {job.model}, {alone.peak.state_bytes / 1e9:.1f} GB of states, on {job.cluster.nodes} x "
                f"{job.cluster.gpus_per_node} {job.cluster.device.name} of {format_bytes(job.cluster.device.memory_bytes)};",
                f"  {job.batch.sequences} sequences of {job.batch.sequence_length}; {job.needs}.",
            ]
        return "\n".join(
            [
                *rows,
                'For each a Plan(dp=all ranks, zero_stage=..., framework="deepspeed" or "fsdp", micro_batch=...,',
                "recompute=...) that fits with headroom and sends the fewest bytes (predicted).",
            ]
        )


def _job(
    model: str, gpu: str, gpus: int, sequences: int, library: str, nodes: int = 1
) -> ShardedJob:
    return ShardedJob(
        model,
        Cluster(gpu=gpu, nodes=nodes, gpus_per_node=gpus),
        Batch(sequences=sequences, sequence_length=1024),
        library,
    )


@functools.cache
def data(seed: int) -> TwoJobs:
    """The jobs of a seed."""
    return TwoJobs(
        {
            1: {
                "A": _job("opt-1.3b", "V100-16GB", 8, 64, "deepspeed"),
                "B": _job("llama-2-7b", "A100-40GB", 8, 64, "fsdp"),
            },
            2: {
                "A": _job("gpt2-1.5b", "RTX 3090", 4, 64, "fsdp"),
                "B": _job("llama-2-13b", "A100-40GB", 8, 64, "deepspeed"),
            },
            3: {
                "A": _job("llama-3-8b", "A100-80GB", 8, 64, "deepspeed"),
                "B": _job("llama-2-7b", "A100-40GB", 8, 64, "fsdp", 2),
            },
        }[seed]
    )


def sent_bytes(job: ShardedJob, plan: Plan) -> float:
    """What a rank sends in a step."""
    return sum(axis_bytes(job.model, plan, job.batch)[0].values())


def par(job: ShardedJob) -> tuple[Plan, float]:
    """A plan in the job's library that sends fewest bytes, and how many."""
    found = []
    for stage, size, kept in itertools.product((0, 1, 2, 3), (1, 2, 4, 8), ("none", "full")):
        plan = Plan(
            dp=job.cluster.gpus,
            zero_stage=stage,
            micro_batch=size,
            recompute=kept,
            framework=job.library,
        )
        try:
            row = estimate(job.model, job.cluster, plan, job.batch)
        except ValueError:  # the batch does not divide
            continue
        if row.fits and not row.tight:
            found.append((sent_bytes(job, plan), row.step_seconds, plan))
    sent, _, plan = min(found, key=lambda row: row[:2])
    return plan, sent


def _verdict(case: TwoJobs, answer: Mapping[str, Any]) -> Verdict:
    sent, least = 0.0, 0.0
    for name, job in case.jobs.items():
        found = _one(name, job, answer[name])
        if isinstance(found, Verdict):
            return found
        sent, least = sent + sent_bytes(job, found.plan), least + par(job)[1]
    return correct(
        "both fit, in the library that their needs name",
        score=scored(sent, least, "sent by a rank in a step of each", gigabytes),
    )


def _one(name: str, job: ShardedJob, plan: Plan) -> Estimate | Verdict:
    if plan.conventions.name != job.library:
        return not_yet(
            f"job {name}: the library",
            got=plan.conventions.name,
            nudge=f"The job: {job.needs}. Which of the two is made for that? Plan(framework=...) names it.",
        )
    if plan.dp != job.cluster.gpus or plan.offload != "none" or plan.lora is not None:
        return not_yet(
            f"job {name}: data parallelism over all {job.cluster.gpus} ranks, all parameters, no offload",
            got=plan_name_of(plan),
        )
    found = estimated(job.model, job.cluster, plan, job.batch, f"job {name}")
    if isinstance(found, Verdict):
        return found
    if problem := room(
        found,
        f"job {name}",
        "The next stage splits one state more. What else shrinks without sending anything?",
    ):
        return problem
    least, sent = par(job)[1], sent_bytes(job, plan)
    if sent > 1.01 * least:
        nudge = (
            "Stage 3 gathers every parameter twice for every micro-batch. Does a lower stage fit, or a larger micro-batch?"
            if plan.zero_stage == 3
            else "From stage 2 on gradients are reduced once for every micro-batch. Is there a "
            "stage, or a micro-batch, that does it less often?"
        )
        return not_yet(
            f"job {name} fits, and sends {sent / least:.1f} times the bytes that it must",
            expected=gigabytes(least),
            got=gigabytes(sent),
            nudge=nudge,
        )
    return found


def _gains(case: TwoJobs, answer: Mapping[str, Any]) -> Gains:
    saved = 0.0
    for name, job in case.jobs.items():
        plain = estimate(
            job.model, job.cluster, Plan(dp=job.cluster.gpus, framework=job.library), job.batch
        )
        mine = estimate(job.model, job.cluster, answer[name], job.batch)
        saved = max(saved, plain.peak.needed_bytes - mine.peak.needed_bytes)
    return Gains(
        bytes_saved=saved,
        bytes_sent=sum(sent_bytes(job, answer[name]) for name, job in case.jobs.items()),
    )


SHEET = Sheet(
    "ZeRO or FSDP",
    "intermediate",
    "choosing a sharding, and its bytes",
    "ZeRO-3 or FSDP, for which case?",
    ("09",),
    {"A": plan_kind(), "B": plan_kind()},
    data,
    _verdict,
    _gains,
)
