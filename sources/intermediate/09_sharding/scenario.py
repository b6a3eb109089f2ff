"""The scenario's step by each scheme: its parts in a table, and its speed beside unsharded's, in every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.planner import Batch

from .step_cost import (
    GPUS,
    GPUS_A_NODE,
    HSDP,
    PLANNER,
    SCHEMES,
    UNSHARDED,
    Part,
    Rates,
    optimizer_ms,
    passes_ms,
    stretched,
    two_levels,
)

Row = dict[str, str | float]
COLUMNS = {  # of the table: which parts stand there
    "a forward, ms": ("forward", True),
    "a backward, ms": ("backward", True),
    "last backward, ms": ("backward", False),
    "after it, ms": ("step", False),
}


class Scenario(NamedTuple):
    """What is trained, and what the page says of collectives.

    Attributes:
        shape: The model.
        batch: Of a step, over all GPUs.
        micro_batch: Sequences at once on a GPU.
        parts: By scheme, its collectives.
        part_ms: Of one of them, on a network of so many GB/s a node.
        cost_ms: Of a step's collectives.
    """

    shape: ModelShape
    batch: Batch
    micro_batch: int
    parts: Mapping[str, Sequence[Part]]
    part_ms: Callable[[Part, float, Rates], float]
    cost_ms: Callable[[Sequence[Part], float, Rates], float]

    @property
    def micro_batches(self) -> int:
        """Of a step, on each GPU."""
        return self.batch.sequences // (GPUS * self.micro_batch)

    def step_ms(self, name: str, network_gb: float, rates: Rates = PLANNER) -> float:
        """Of a step: its passes, what its collectives cost, and the optimizer."""
        passes = sum(passes_ms(self.shape, self.batch, self.micro_batch).values())
        cost = self.cost_ms(self.parts[name], network_gb, rates)
        rest = optimizer_ms(SCHEMES[name], self.shape.parameter_count, rates)
        return self.micro_batches * passes + cost + rest

    def tokens(self, name: str, network_gb: float) -> float:
        """Tokens in a second of one GPU."""
        tokens = self.batch.sequences * self.batch.sequence_length / GPUS
        return 1000 * tokens / self.step_ms(name, network_gb)

    def percents(self, network_gb: float) -> dict[str, list[float]]:
        """By scheme, speed in percent of unsharded's: as the planner says, then in each changed case.

        In the last case unsharded's all-reduce goes in two levels, as HSDP's does.
        """
        cases = [PLANNER, *stretched().values()]
        other = self._replace(parts={**self.parts, UNSHARDED: two_levels(self.parts[HSDP])})
        whole = [self.step_ms(UNSHARDED, network_gb, rates) for rates in cases]
        whole.append(other.step_ms(UNSHARDED, network_gb))
        return {
            name: [
                100 * its / (its if name == UNSHARDED else self.step_ms(name, network_gb, rates))
                for its, rates in zip(whole, [*cases, PLANNER], strict=True)
            ]
            for name in self.parts
        }

    def rows(self, network_gb: float) -> list[Row]:
        """A row for each scheme: its collectives by the pass beside them, what they cost, and the step."""
        return [
            {
                "": name,
                "rank sends, GB": sum(part.sent_gb * self._times(part) for part in found),
                "node sends, GB": sum(_leaves_node(part) * self._times(part) for part in found),
                "calls": round(sum(part.calls * self._times(part) for part in found)),
                **{
                    label: sum(
                        self.part_ms(part, network_gb, PLANNER)
                        for part in found
                        if (part.beside, part.each) == where
                    )
                    for label, where in COLUMNS.items()
                },
                "cost, ms": self.cost_ms(found, network_gb, PLANNER),
                "optimizer, ms": optimizer_ms(SCHEMES[name], self.shape.parameter_count),
                "step, ms": self.step_ms(name, network_gb),
            }
            for name, found in self.parts.items()
        ]

    def _times(self, part: Part) -> int:
        """How often in a step."""
        return self.micro_batches if part.each else 1

    def kept(self, network_gb: float, least_percent: float) -> str:
        """Which schemes keep that share of unsharded's speed in every case, and which in some."""
        labels = ["as above", *stretched(), "unsharded in two levels"]
        always, some = list[str](), list[str]()
        for name, shares in self.percents(network_gb).items():
            lost = [
                case for case, share in zip(labels, shares, strict=True) if share < least_percent
            ]
            if name != UNSHARDED and not lost:
                always.append(name)
            elif len(lost) < len(labels) and name != UNSHARDED:
                where = f", all but {lost[0]}" if len(lost) == 1 else ""
                some.append(f"{name} ({len(labels) - len(lost)}{where})")
        return (
            f"{network_gb:g} GB/s: {least_percent}% kept in all {len(labels)} cases by "
            f"{', '.join(always) or 'none'}; in some by {', '.join(some) or 'none'}"
        )


def _leaves_node(part: Part) -> float:
    """GB: one ring leaves a node once; rings of one GPU of each node are as many as it has GPUs."""
    return part.sent_gb * {"NVLink": 0, "node": 1, "port": GPUS_A_NODE}[part.link]


__all__ = ["Scenario"]

check_public(globals())
