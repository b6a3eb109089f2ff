"""`validate()`: every published table beside the planner, in one table."""

from __future__ import annotations

from collections.abc import Callable

from evidence.validation import (
    adapters,
    b200,
    bloom,
    bridge,
    buses,
    eager,
    failures,
    foundry,
    megatron,
    megatron_experts,
    offload,
    scale,
    states,
    times,
    torchtitan,
    ultrascale,
)
from evidence.validation.comparison import Comparison, Summary, summarize
from utils.rules import one_of

SOURCES: dict[str, Callable[[], list[Comparison]]] = {
    "korthikanti-memory": states.korthikanti_comparisons,
    "megatron": megatron.comparisons,
    "megatron-experts": megatron_experts.comparisons,
    "ultrascale-memory": ultrascale.memory_comparisons,
    "bloom-memory": bloom.memory_comparisons,
    "adapters": adapters.comparisons,
    "qwen-memory": eager.memory_comparisons,
    "eager-seconds": eager.comparisons,
    "korthikanti-seconds": times.korthikanti_comparisons,
    "ultrascale-speed": ultrascale.speed_comparisons,
    "bloom-seconds": bloom.seconds_comparisons,
    "foundry": foundry.comparisons,
    "torchtitan": torchtitan.comparisons,
    "b200-memory": b200.memory_comparisons,
    "b200-seconds": b200.seconds_comparisons,
    "megatron-bridge": bridge.comparisons,
    "offload": offload.comparisons,
    "internevo": scale.internevo_comparisons,
    "fms-fsdp": scale.fms_comparisons,
    "megascale": scale.megascale_comparisons,
    "bus-bandwidth": buses.comparisons,
}


def compare_all(sources: tuple[str, ...] = tuple(SOURCES)) -> list[Comparison]:
    """Every published number with its prediction.

    Raises:
        ValueError: no source, or one that is not in `SOURCES`.
    """
    if not sources:
        raise ValueError(f"sources is empty; there are {', '.join(SOURCES)}.")
    for name in sources:
        one_of("sources", name, tuple(SOURCES))
    return [row for name in sources for row in SOURCES[name]()]


def validate(sources: tuple[str, ...] = tuple(SOURCES)) -> list[Summary]:
    """Print predicted against published, source by source, and return the figures.

    What is right or wrong, rather than near or far, is printed where all sources are asked for.

    "unfitted" is the median of the rows that no constant was set on; "seen" and "left out" are the
    means of those that one was, and of the others.
    """
    summaries = summarize(compare_all(sources))
    print_summaries(summaries)
    for line in verdicts() if set(sources) == set(SOURCES) else ():
        print(line)
    return summaries


def print_summaries(summaries: list[Summary]) -> None:
    """One line a source and quantity, under a head."""
    print(
        f"{'source':<30}{'quantity':<24}{'rows':>5}{'median':>8}{'mean':>7}{'p90':>7}"
        f"{'worst':>7}{'bias':>7}{'naive':>7}{'unfitted':>9}{'seen':>7}{'left out':>9}"
    )
    for row in summaries:
        print(_line(row))


def print_worst(sources: tuple[str, ...], rows: int) -> None:
    """The rows of each quantity that are farthest off: what was published, predicted, and set on."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for row in compare_all(sources):
        groups.setdefault((row.source, row.quantity), []).append(row)
    for (source, quantity), group in groups.items():
        print(f"\n{source}, {quantity}\n{'published':>12}{'predicted':>12}{'error':>8}  row")
        for row in sorted(group, key=lambda row: -abs(row.error))[:rows]:
            seen = "  (a constant was set on it)" * row.fitted
            print(
                f"{row.published:>12.4g}{row.predicted:>12.4g}{row.error:>+8.1%}  {row.case}{seen}"
            )


def verdicts() -> list[str]:
    """What is right or wrong rather than near or far, one sentence each."""
    cells, fits, lost = states.zero_cells(), bloom.fit_verdicts(), ultrascale.regrets()
    losses = sorted(row.loss for row in lost)
    failed = sorted(row.loss for row in ultrascale.regrets(pathologies=True))
    foundry_fits = [fit for _, fit in foundry.fit_verdicts()]
    bridge_fits = [fit for _, fit in bridge.fit_verdicts()]
    inside = [row.inside for row in failures.intervals()]
    slow, peer = sorted(ratio for _, ratio in ultrascale.tight_rows()), b200.simumax_errors()
    lines = [
        f"ZeRO Table 1: {sum(c.printed == c.ours for c in cells)} of {len(cells)} cells as printed",
        f"BLOOM prequel: {sum(ran == fit for _, ran, fit in fits)} of {len(fits)} fits and OOMs "
        "right",
        f"llm-foundry: {sum(foundry_fits)} of {len(foundry_fits)} micro-batches fit",
        f"Megatron-Bridge in fp8: {sum(bridge_fits)} of {len(bridge_fits)} that ran fit",
        f"Ultra-Scale regret: median {losses[len(losses) // 2]:.1%}, worst {losses[-1]:.1%} "
        f"of {len(losses)}; with the network's failures on 64 nodes median "
        f"{failed[len(failed) // 2]:.1%}, worst {failed[-1]:.1%}",
        f"Ultra-Scale layouts within the allocator's reach: {len(slow)}, which ran "
        f"{slow[len(slow) // 2]:.1f} times as long as predicted (median)",
        f"SimuMax on the same B200, calibrated there: seconds {peer[0]:.1%}, bytes {peer[1]:.1%} "
        "(means)",
        f"failures: {sum(inside)} of {len(inside)} inside the stated interval",
        f"ZeRO-3 at 530B on 560 GPUs, micro-batch 4: "
        f"{'fits' if times.zero_3_at_530b_on_560_gpus_fits() else 'does not fit'}",
    ]
    for why, count in megatron_experts.left_out().items():
        lines.append(f"Megatron-LM's rows with experts: {count} are not compared: {why}")
    for name, (published, predicted) in bloom.effects().items():
        lines.append(f"BLOOM effect of {name}: {published:+.1%} published, {predicted:+.1%} ours")
    return lines


def _line(row: Summary) -> str:
    figures = [
        row.median,
        row.mean,
        row.p90,
        row.worst,
        row.bias,
        row.baseline,
        row.unfitted,
        row.seen_mean,
        row.left_out_mean,
    ]
    cells = ["-" if figure is None else f"{figure:.1%}" for figure in figures]
    widths = (8, 7, 7, 7, 7, 7, 9, 7, 9)
    numbers = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{row.source:<30}{row.quantity:<24}{row.rows:>5}{numbers}"
