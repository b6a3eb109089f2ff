"""`estimate`: memory, time, utilization and cost of one plan."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.flops import hardware_flops, model_flops
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.stage_bytes import stage_memories
from utils.planner.stage_bytes.host import check_host, node_host_bytes
from utils.planner.stage_bytes.stage_memory import StageMemory, worst
from utils.planner.step_seconds import StepTime, time_of_step
from utils.rules import of_kind
from utils.units import GIB, Evidence

# Of the published numbers in evidence.validation, 80% lie between these multiples of the prediction:
# seconds on the Ultra-Scale sweep, bytes on the same; the other sources lie closer.
SECONDS_INTERVAL = (0.90, 1.15)
BYTES_INTERVAL = (0.93, 1.13)
# Where one GPU runs eager code, how fast the host launches and which kernels a library brings along
# decide. The even lines of evidence.validation.eager lie between 0.71 and 1.27 of the prediction, the
# steps that evidence.recorded has of an H200 in a virtual machine between 0.95 and 1.78: the long ones
# near 1, those that wait for the host above, at 27 to 38 microseconds a launch.
EAGER_INTERVAL = (0.70, 1.80)


@dataclass(frozen=True)
class Estimate:
    """What a plan needs and gives.

    Attributes:
        model, cluster, plan, batch: What was asked.
        stages: Peak memory of each pipeline stage.
        time: Where the seconds of a step go.
        evidence: Always predicted.
    """

    model: ModelShape
    cluster: Cluster
    plan: Plan
    batch: Batch
    stages: tuple[StageMemory, ...]
    time: StepTime
    evidence: Evidence = Evidence.PREDICTED

    def __str__(self) -> str:
        """The plan, the fullest stage's bytes by category, and the step's seconds by part."""
        plain = vars(Plan())
        given = [
            f"{key}={value!r}" for key, value in vars(self.plan).items() if value != plain[key]
        ]
        held = self.peak.bytes_by_category.items()
        parts = [f"{name.value} {size / GIB:.2f}" for name, size in held if size]
        parts.append(f"beside the allocator {self.peak.context_bytes / GIB:.2f}")
        spent = [f"{name} {seconds:.4g}" for name, seconds in vars(self.time).items() if seconds]
        return (
            f"{self.model.name}, Plan({', '.join(given)})\n"
            f"{self.peak.allocated_bytes / GIB:.2f} GiB at the peak ({self.peak.phase}), "
            f"{self.verdict}: {', '.join(parts)}\n"
            f"{self.step_seconds:.4g} s a step, {self.mfu:.1%} of peak: {', '.join(spent)}"
        )

    @property
    def peak(self) -> StageMemory:
        """The stage that holds most."""
        return worst(self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage has room on the device."""
        return self.peak.fits(self.cluster.device)

    @property
    def tight(self) -> bool:
        """Whether some stage fits only within the allocator's reach, see `StageMemory.tight`."""
        return any(stage.tight(self.cluster.device) for stage in self.stages)

    @property
    def verdict(self) -> str:
        """Of the fullest stage: "fits", or within the allocator's reach, or "does not fit"."""
        return max(self.stages, key=_device_bytes).verdict(self.cluster.device)

    @property
    def missing_bytes(self) -> float:
        """What the fullest stage lacks; 0 where the plan fits."""
        return max(0.0, self.peak.needed_bytes - self.cluster.device.memory_bytes)

    @property
    def host_bytes(self) -> float:
        """What offload puts into the memory of one node."""
        return node_host_bytes(self.cluster, self.stages)

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.time.total

    @property
    def step_seconds_interval(self) -> tuple[float, float]:
        """Between these 80% of measured steps lie; see `EAGER_INTERVAL` for eager code."""
        eager = self.plan.conventions.launches is not None and self.plan.ranks == 1
        low, high = EAGER_INTERVAL if eager else SECONDS_INTERVAL
        return low * self.step_seconds, high * self.step_seconds

    @property
    def peak_bytes_interval(self) -> tuple[float, float]:
        """Between these 80% of measured peaks lie, for the fullest stage."""
        low, high = BYTES_INTERVAL
        return low * self.peak.reserved_bytes, high * self.peak.reserved_bytes

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        return self.batch.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over peak FLOP/s, see `flops`."""
        return model_flops(self.model, self.batch) / self._peak_flops

    @property
    def hfu(self) -> float:
        """The same with what is recomputed."""
        return hardware_flops(self.model, self.plan, self.batch) / self._peak_flops

    @property
    def _peak_flops(self) -> float:
        gpu = self.cluster.device
        peak = gpu.peak_flops_per_second("bf16" if gpu.bf16_native else "fp16")
        return self.cluster.gpus * peak * self.step_seconds

    @property
    def bubble(self) -> float:
        """Share of the step that the slowest stage idles or sends between stages."""
        return self.time.pipeline / self.step_seconds


def _device_bytes(stage: StageMemory) -> float:
    return stage.device_bytes


def estimate(model: ModelShape | str, cluster: Cluster, plan: Plan, batch: Batch) -> Estimate:
    """Predict memory and time of one plan.

    Args:
        model: What is trained: a shape, or a name of the catalog such as "llama-2-7b".
        cluster: On what.
        plan: How it is laid out there; it must use the whole cluster.
        batch: The global batch.

    Raises:
        ValueError: plan, model, batch and cluster do not go together; the sentence has the rule,
            the numbers and the nearest valid choice.
    """
    model = model_shape(model)
    of_kind("estimate", cluster=(cluster, Cluster), plan=(plan, Plan), batch=(batch, Batch))
    context = ClusterPlanContext(model, plan, batch, cluster)
    context.check()
    return estimated(context)


def estimated(context: ClusterPlanContext) -> Estimate:
    """`estimate` of a context that is already checked, but for its precision and its host."""
    seconds, rows = time_of_step(context), stage_memories(context)
    check_host(context.cluster, rows)
    return Estimate(context.model, context.cluster, context.plan, context.batch, rows, seconds)
