"""The Ultra-Scale Playbook's sweep: nanotron on 8 to 512 H100, thousands of layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Plan, memory, step_time
from utils.planner.flops import model_flops
from utils.planner.frameworks import framework
from utils.units import GB, GIB

# nanotron's scripts/scaling_benchmarks.py: no grouped queries, heads of the embedding tied in
# models with a feed-forward width below 10,000.
MODELS = {
    "1B": ModelShape(name="nanotron-1b", family="llama", layers=16, hidden=2048, heads=32,
                     feedforward=8192, vocabulary=131_072, max_sequence=4096, tied=True),
    "8B": ModelShape(name="nanotron-8b", family="llama", layers=32, hidden=4096, heads=32,
                     feedforward=14_336, vocabulary=131_072, max_sequence=4096),
    "80B": ModelShape(name="nanotron-80b", family="llama", layers=80, hidden=8192, heads=64,
                      feedforward=28_672, vocabulary=131_072, max_sequence=4096),
}  # fmt: skip
SEQUENCE_LENGTH = 4096

# The same script repeats the runs with stages under a later nanotron ("pp==1: skip ... job_id <
# 14097150"), so the table mixes two versions, and these differ in whether the inputs of
# column-parallel matrices stay gathered. No column says which ran; the memory of the rows does: it
# is mostly the later one's with ZeRO-1 and stages over nodes, on 32 nodes and more or with two
# stages and tp of 4 and more. That rule was read off all rows, so that for it no half is left out.
# The shares describe the mixture that remains; they were set on the even lines. None of this is a
# constant of the planner.
GATHERED_EARLIER, GATHERED_LATER = 0.7, 0.1
MIXED = ("1B", "8B")  # whose rows are here, and tell; others are taken as nanotron is now


def later_version(row: dict[str, str]) -> bool:
    """Whether most rows like this one ran under the later nanotron."""
    if row["model"] not in MIXED:
        return True
    pp, tp, nodes = (whole(row[name]) for name in ("pp", "tp", "nodes"))
    sharded = pp > 1 and nodes > 1 and row["zero"] == "1"
    return sharded and (nodes >= 32 or (pp == 2 and tp >= 4))


def measured() -> list[tuple[int, dict[str, str]]]:
    """Line number and row of the layouts that ran within nodes (tp up to 8)."""
    rows = enumerate(table("ultrascale_nanotron_h100"))
    return [(i, r) for i, r in rows if r["status"] == "measured" and int(r["tp"]) <= 8]


def memory_comparisons() -> list[Comparison]:
    """Reserved GiB of the first stage, the one that the run logged."""
    rows = []
    for line, row in measured():
        model, plan, batch = setup(row)
        first = memory(model, plan, batch)[0]
        rows.append(
            Comparison("Ultra-Scale sweep", "reserved GiB", case(row), float(row["gpu_memory_gb"]),
                       first.reserved_on(cluster(plan.ranks).device) / GIB, first.parameters,
                       line % 2 == 0)
        )  # fmt: skip
    return rows


def speed_comparisons() -> list[Comparison]:
    """Tokens per second and GPU, where no network pathology held the run under 15% MFU.

    Layouts that the planner calls tight are apart, see `tight_rows`: it promises no speed for them.
    """
    rows = []
    for line, row in measured():
        if float(row["mfu_pct"]) >= 15 and not tight(row):
            model, _plan, batch = setup(row)
            size = batch.tokens / model_flops(model, batch)
            rows.append(
                Comparison("Ultra-Scale sweep", "tokens/s/GPU", case(row), float(row["tok_s_gpu"]),
                           tokens_per_second_per_gpu(row), size, line % 2 == 0)
            )  # fmt: skip
    return rows


def tight(row: dict[str, str]) -> bool:
    """Whether some stage fits only within the allocator's reach."""
    model, plan, batch = setup(row)
    gpu = cluster(plan.ranks).device
    return any(stage.tight(gpu) for stage in memory(model, plan, batch))


def tight_rows() -> list[tuple[str, float]]:
    """(row, measured over predicted seconds) of every layout that is tight."""
    rows = [row for _, row in measured() if tight(row)]
    return [(case(r), tokens_per_second_per_gpu(r) / float(r["tok_s_gpu"])) for r in rows]


def tokens_per_second_per_gpu(row: dict[str, str]) -> float:
    """Predicted for one row."""
    model, plan, batch = setup(row)
    seconds = step_time(model, cluster(plan.ranks), plan, batch).total
    return batch.tokens / seconds / plan.ranks


def cluster(gpus: int) -> Cluster:
    """Eight H100 and 3,200 Gb/s a node (AWS p5.48xlarge)."""
    return Cluster(
        gpu="H100", nodes=max(1, gpus // 8), network_bytes_per_second=400 * GB, network_kind="EFA"
    )


@dataclass(frozen=True)
class Regret:
    """What following the planner costs, for one model on so many nodes.

    Attributes:
        model, nodes: Which.
        choices: Measured layouts to choose from.
        loss: 1 - measured speed of the layout that we would pick / speed of the best measured.
    """

    model: str
    nodes: int
    choices: int
    loss: float


def regrets(pathologies: bool = False) -> list[Regret]:
    """For every model and number of nodes, among its measured layouts within nodes.

    Args:
        pathologies: Also choose among the runs on 64 nodes that stayed under 10% MFU, where it was
            the network that failed, not the layout.
    """
    groups: dict[tuple[str, int], list[dict[str, str]]] = {}
    for _, row in measured():
        if setup(row)[2].sequences != whole(row["gbs"]):
            continue  # three lines ran another global batch
        if row["nodes"] == "64" and float(row["mfu_pct"]) < 10 and not pathologies:
            continue
        groups.setdefault((row["model"], whole(row["nodes"])), []).append(row)
    found = []
    for (model, nodes), rows in sorted(groups.items()):
        roomy = [row for row in rows if not tight(row)]
        pick = max(roomy or rows, key=tokens_per_second_per_gpu)
        best = max(float(row["tok_s_gpu"]) for row in rows)
        found.append(Regret(model, nodes, len(rows), 1 - float(pick["tok_s_gpu"]) / best))
    return found


def setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    """Model, plan and batch of one row."""
    dp, tp, pp = (whole(row[name]) for name in ("dp", "tp", "pp"))
    share = GATHERED_LATER if later_version(row) else GATHERED_EARLIER
    rules = replace(framework("nanotron"), gathered_inputs=share)
    plan = Plan(
        dp=dp, tp=tp, pp=pp, zero_stage=whole(row["zero"]) if dp > 1 else 0,
        sequence_parallel=tp > 1, micro_batch=whole(row["mbs"]), partition="compute",
        framework=rules,
    )  # fmt: skip
    sequences = dp * plan.micro_batch * whole(row["grad_acc"])
    return MODELS[row["model"]], plan, Batch(sequences=sequences, sequence_length=SEQUENCE_LENGTH)


def case(row: dict[str, str]) -> str:
    """A row's name."""
    return (
        f"{row['model']} dp{row['dp']} tp{row['tp']} pp{row['pp']} zero{row['zero']} "
        f"mbs{row['mbs']} x{row['grad_acc']}"
    )
