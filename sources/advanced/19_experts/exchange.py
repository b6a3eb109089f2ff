"""What ranks tell each other before rows are exchanged, and what they refuse, all with one sentence.

Counts travel before rows, in an all-gather of one whole number for each expert. What one rank alone
could see (NaN in its router) travels with them, so that every rank raises, and none waits for rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class RoutingError(ValueError):
    """Rows that cannot be exchanged; its text is the same on every rank."""


def held_experts(experts: int, ranks: int) -> int:
    """Experts on each of `ranks` ranks.

    Raises:
        RoutingError: they do not divide evenly; it names numbers of ranks that do.
    """
    if ranks < 1 or experts % ranks:
        fit = [n for n in range(1, experts + 1) if experts % n == 0]
        raise RoutingError(
            f"{experts} experts do not divide evenly over {ranks} ranks. Take a number of ranks that "
            f"divides them, {', '.join(map(str, fit))}, or other experts."
        )
    return experts // ranks


def gathered_counts(
    choice: Tensor,
    probabilities: Tensor,
    held: int,
    group: dist.ProcessGroup | None = None,
    most_rows: int | None = None,
) -> Tensor:
    """Rows that every rank has for every expert, (ranks, E): one all-gather of 8 E bytes.

    Args:
        choice: (T, k), the experts of this rank's tokens.
        probabilities: (T, E), as the router gave them.
        held: experts on each rank.
        group: the ranks that share the experts; None for all.
        most_rows: what one rank has room for; None where that is not limited.

    Raises:
        RoutingError: on every rank of the group alike. A router gave NaN or infinity, experts do not
            divide over the ranks, or a rank would get more rows than it has room for.
    """
    ranks, experts = dist.get_world_size(group), probabilities.shape[-1]
    broken = int((~probabilities.isfinite()).any(-1).sum())
    counts = choice.flatten().bincount(minlength=experts)
    if broken:  # no count is negative, so this is a message
        counts = torch.full_like(counts, -broken)
    flat = counts.new_empty(ranks * experts)
    dist.all_gather_into_tensor(flat, counts, group=group)
    everyone = flat.view(ranks, experts)
    _refuse_broken(everyone)
    if held * ranks != experts:
        held_experts(experts, ranks)
        raise RoutingError(
            f"A rank holds {held} of {experts} experts, and {ranks} ranks share them: it is to hold "
            f"{experts // ranks}. Were the experts cut for another number of ranks?"
        )
    if most_rows is not None:
        _refuse_crowded(everyone, held, most_rows)
    return everyone


def _refuse_broken(everyone: Tensor) -> None:
    for rank, count in enumerate(everyone[:, 0].tolist()):
        if count < 0:
            raise RoutingError(
                f"The router of rank {rank} gave NaN or infinity for {-count} of its tokens. Look at "
                "what comes in: a loss that diverged, or fp16 logits beyond 65,504. Routers work in fp32."
            )


def _refuse_crowded(everyone: Tensor, held: int, most_rows: int) -> None:
    rows = everyone.sum(0)
    by_rank = rows.view(-1, held).sum(1)
    worst, expert = int(by_rank.argmax()), int(rows.argmax())
    if by_rank[worst] > most_rows:
        raise RoutingError(
            f"Rank {worst} would get {int(by_rank[worst]):,} rows and has room for {most_rows:,}: expert "
            f"{expert} alone is sent {rows[expert] / rows.sum():.0%} of all rows. Balance the router, or "
            "give experts a capacity."
        )
