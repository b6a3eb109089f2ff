"""Loss by parameters and tokens, and what a budget should buy.

L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv:2203.15556, equation 2), with
6 N D FLOP of training and 2 N for each token served (Sardana et al. 2023, arXiv:2401.00448,
equation 2). At a fixed FLOP C the best size is N = G (C / 6)^(beta / (alpha + beta)) with
G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al., equation 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from utils.checked import check_public
from utils.rules import positive

__all__ = ["CHINCHILLA", "REPLICATION", "UNROUNDED", "ScalingLaw"]

TRAIN_FLOP, SERVE_FLOP = 6, 2  # for each parameter and token: forward 2, backward twice that


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, loss in nats a token.

    Attributes:
        e: What no model of this text gets below.
        a, alpha: What too few parameters cost.
        b, beta: What too few tokens cost.
        source: Where the constants are from.
        errors: Standard errors of e, a, b, alpha, beta where they were published.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str = ""
    errors: dict[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a constant that is not above zero (E may be 0)."""
        positive(
            "scaling law", least=0, e=self.e, a=self.a, b=self.b, alpha=self.alpha, beta=self.beta
        )
        for name in ("a", "b", "alpha", "beta"):
            if getattr(self, name) == 0:
                raise ValueError(f"scaling law: {name} is 0, so nothing improves with scale.")

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token after training `parameters` on `tokens`."""
        positive("scaling law", parameters=parameters, tokens=tokens)
        return self.e + self.a * parameters**-self.alpha + self.b * tokens**-self.beta

    def best_parameters(self, train_flop: float) -> float:
        """The size that gives the lowest loss for so much training (compute-optimal)."""
        positive("scaling law", train_flop=train_flop)
        both = self.alpha + self.beta
        scale = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        return scale * (train_flop / TRAIN_FLOP) ** (self.beta / both)

    def best_tokens(self, train_flop: float) -> float:
        """The tokens that go with `best_parameters`."""
        return train_flop / TRAIN_FLOP / self.best_parameters(train_flop)

    def least_parameters(self, loss: float) -> float:
        """Below this size no amount of tokens reaches the loss.

        Raises:
            ValueError: the loss is not above E.
        """
        if not self.e < loss < math.inf:
            raise ValueError(
                f"No model reaches a loss of {loss}: the law's floor is {self.e}. Ask for more than that."
            )
        return (self.a / (loss - self.e)) ** (1 / self.alpha)

    def tokens_for(self, loss: float, parameters: float) -> float:
        """How many tokens a model of this size needs to reach a loss.

        Raises:
            ValueError: the model is too small for it, or no model reaches it.
        """
        least = self.least_parameters(loss)
        if parameters <= least:
            raise ValueError(
                f"{parameters:.3g} parameters never reach a loss of {loss}: it takes more than {least:.3g}."
            )
        missing = loss - self.e - self.a * parameters**-self.alpha
        return (self.b / missing) ** (1 / self.beta)

    def lifetime_flop(self, loss: float, parameters: float, served_tokens: float = 0.0) -> float:
        """FLOP to train a model of this size to a loss and to serve so many tokens with it."""
        positive("scaling law", least=0, served_tokens=served_tokens)
        train = TRAIN_FLOP * self.tokens_for(loss, parameters)
        return parameters * (train + SERVE_FLOP * served_tokens)

    def cheapest_parameters(
        self, loss: float, served_tokens: float = 0.0, served_price: float = 1.0
    ) -> float:
        """The size whose training and serving to a loss costs least.

        Args:
            loss: To reach.
            served_tokens: Over the model's life.
            served_price: Price of a served FLOP over that of a trained one. Serving runs at a lower
                MFU, so it is above 1 in practice (Sardana et al. 2023, section 3).

        Raises:
            ValueError: no model reaches the loss, or a count below zero.
        """
        positive("scaling law", least=0, served_price=served_price)
        least = math.log(self.least_parameters(loss))

        def flop(above: float) -> float:
            return self.lifetime_flop(loss, math.exp(least + above), served_price * served_tokens)

        return math.exp(least + _lowest(flop, 1e-6, 30.0))


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with a single valley is lowest, by the golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2


CHINCHILLA = ScalingLaw(
    1.69,
    406.4,
    410.7,
    0.34,
    0.28,
    "Hoffmann et al. 2022, arXiv:2203.15556, equation 10, as printed",
)
UNROUNDED = ScalingLaw(
    1.6934, 406.4, 410.7, 0.3392, 0.2849, "Hoffmann et al. 2022, from the source of the paper"
)  # as Besiroglu et al. 2024 quote it
REPLICATION = ScalingLaw(
    1.8172,
    482.01,
    2085.43,
    0.3478,
    0.3658,
    "Besiroglu et al. 2024, arXiv:2404.10102",
    {"e": 0.03, "a": 124.58, "b": 1293.23, "alpha": 0.02, "beta": 0.02},
)


check_public(globals())
