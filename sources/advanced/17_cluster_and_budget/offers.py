"""Machines on offer, and the cheapest of them that trains to a loss by a deadline.

Money pays for training and for serving; only training has a deadline. Training slows down by a share
with each doubling of the nodes, so the smallest cluster that is in time is the cheapest of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from utils.catalog.age import day_of
from utils.planner.goodput import DAY
from utils.rules import keep_whole, positive

from .scaling import SERVE_FLOP, TRAIN_FLOP, ScalingLaw

STATE_BYTES = 16  # a parameter's weights, gradient and Adam states, over all GPUs
USABLE = 0.8  # of all memory; the rest is for activations
SIZES = 400  # sizes of model that the search tries between the least and 100 times that


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Nodes of one kind at a dated price.

    Attributes:
        name: What it is called.
        usd_per_gpu_hour, as_of: The price and the day it was read.
        flops_per_second: What one GPU trains with on one node: peak x MFU.
        memory_bytes: Of one GPU.
        gpus_per_node, most_nodes: How many there are.
        lost_per_doubling: Share of the speed that is lost each time the nodes double.
    """

    name: str
    usd_per_gpu_hour: float
    as_of: str
    flops_per_second: float
    memory_bytes: float
    gpus_per_node: int = 8
    most_nodes: int = 64
    lost_per_doubling: float = 0.02

    def __post_init__(self) -> None:
        """Raises ValueError for a price without a date, or a figure that is not above zero."""
        day_of(self.as_of, f"offer {self.name}")
        keep_whole(self, f"offer {self.name}", "gpus_per_node", "most_nodes")
        for name in ("usd_per_gpu_hour", "flops_per_second", "memory_bytes"):
            positive(f"offer {self.name}", least=0, **{name: getattr(self, name)})
            if not getattr(self, name):
                raise ValueError(f"offer {self.name}: {name} is 0; it must be above 0.")
        if not 0 <= self.lost_per_doubling < 1:
            raise ValueError(f"offer {self.name}: lost_per_doubling is a share from 0 to below 1.")

    def speed(self, nodes: int) -> float:
        """FLOP/s of so many nodes together."""
        kept = (1 - self.lost_per_doubling) ** math.log2(nodes)
        return nodes * self.gpus_per_node * self.flops_per_second * kept

    def holds(self, nodes: int, parameters: float) -> bool:
        """Whether the states of a model fit on so many nodes, sharded over all of them."""
        memory = nodes * self.gpus_per_node * self.memory_bytes
        return STATE_BYTES * parameters <= USABLE * memory

    def days(self, nodes: int, train_flop: float) -> float:
        """Days to train."""
        return train_flop / self.speed(nodes) / DAY

    def usd(self, nodes: int, train_flop: float, serve_flop: float = 0.0) -> float:
        """Dollars to train on so many nodes and to serve on one GPU at a time."""
        hourly = self.usd_per_gpu_hour / 3600
        train = nodes * self.gpus_per_node * hourly * train_flop / self.speed(nodes)
        return train + hourly * serve_flop / self.flops_per_second


@dataclass(frozen=True)
class Purchase:
    """One way to the loss: what is rented, what is trained, and what that takes."""

    offer: Offer
    nodes: int
    parameters: float
    tokens: float
    days: float
    usd: float


def purchase(
    law: ScalingLaw, loss: float, offer: Offer, nodes: int, parameters: float, served_tokens: float
) -> Purchase:
    """What this size on these nodes takes to reach the loss and to serve.

    Raises:
        ValueError: a model of this size does not reach the loss.
    """
    tokens = law.tokens_for(loss, parameters)
    flop = TRAIN_FLOP * parameters * tokens
    usd = offer.usd(nodes, flop, SERVE_FLOP * parameters * served_tokens)
    return Purchase(offer, nodes, parameters, tokens, offer.days(nodes, flop), usd)


def cheapest(
    law: ScalingLaw, loss: float, days: float, offers: Sequence[Offer], served_tokens: float = 0.0
) -> Purchase | None:
    """The cheapest way by trying all: every offer, every number of nodes, 400 sizes. None: no way."""
    if loss <= law.e:
        return None
    least = law.least_parameters(loss)
    sizes = [least * 1.001 * 100 ** (k / SIZES) for k in range(SIZES + 1)]
    tokens = [law.tokens_for(loss, size) for size in sizes]
    best: tuple[float, Offer, int, float] | None = None
    for offer in offers:
        for nodes in range(1, offer.most_nodes + 1):
            for size, amount in zip(sizes, tokens, strict=True):
                flop = TRAIN_FLOP * size * amount
                if offer.holds(nodes, size) and offer.days(nodes, flop) <= days:
                    usd = offer.usd(nodes, flop, SERVE_FLOP * size * served_tokens)
                    if best is None or usd < best[0]:
                        best = usd, offer, nodes, size
    if best is None:
        return None
    return purchase(law, loss, *best[1:], served_tokens)
