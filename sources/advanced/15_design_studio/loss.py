"""What a run buys: the loss that published fits predict for a model on so many tokens.

Hoffmann et al. 2022 (arXiv:2203.15556), approach 3: loss = E + A / N^alpha + B / D^beta for N parameters
and D tokens, in nats a token of their own text.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.checked import check_public
from utils.rules import of_kind, positive

__all__ = ["FIRST_FIT", "REFIT", "Fit", "cheapest", "compute_share", "loss", "tokens_for"]


@dataclass(frozen=True)
class Fit:
    """Constants of one fit.

    Attributes:
        floor: E, what no model goes below.
        a, alpha: Of the parameters.
        b, beta: Of the tokens.
    """

    floor: float
    a: float
    alpha: float
    b: float
    beta: float


# As printed in Hoffmann et al., equation 10; and fitted again to the same runs, read from the paper's
# figure, since the printed constants are rounded and contradict its approaches 1 and 2 (Besiroglu et
# al. 2024, arXiv:2404.10102, table 1).
FIRST_FIT = Fit(1.69, 406.4, 0.34, 410.7, 0.28)
REFIT = Fit(1.8172, 482.01, 0.3478, 2085.43, 0.3658)


def loss(parameters: float, tokens: float, fit: Fit = REFIT) -> float:
    """Predicted loss in nats a token.

    Raises:
        ValueError: fewer than 1 parameter or token.
    """
    return fit.floor + sum(_parts(parameters, tokens, fit))


def cheapest(parameters: float, tokens: float, fit: Fit = REFIT) -> tuple[float, float]:
    """Parameters and tokens that reach the same predicted loss for the least compute.

    Of u = A / N^alpha and v = B / D^beta with a given sum, N * D is least where alpha * u = beta * v.
    """
    rest = sum(_parts(parameters, tokens, fit))
    u = rest * fit.beta / (fit.alpha + fit.beta)
    return (fit.a / u) ** (1 / fit.alpha), (fit.b / (rest - u)) ** (1 / fit.beta)


def compute_share(parameters: float, tokens: float, fit: Fit = REFIT) -> float:
    """Compute of the cheapest way to the same predicted loss, over this one's."""
    best_parameters, best_tokens = cheapest(parameters, tokens, fit)
    return best_parameters * best_tokens / (parameters * tokens)


def tokens_for(parameters: float, reached: float, fit: Fit = REFIT) -> float:
    """Tokens with which a model of that size reaches a predicted loss.

    Raises:
        ValueError: fewer than 1 parameter, or no number of tokens is enough.
    """
    of_kind("tokens_for", fit=(fit, Fit))
    positive("tokens_for", parameters=parameters)
    rest = reached - fit.floor - fit.a / parameters**fit.alpha
    if rest <= 0:
        raise ValueError(
            f"{parameters / 1e9:.1f}B parameters never reach a predicted loss of {reached:.3f}; take more."
        )
    return (fit.b / rest) ** (1 / fit.beta)


def _parts(parameters: float, tokens: float, fit: Fit) -> tuple[float, float]:
    of_kind("loss", fit=(fit, Fit))
    positive("loss", parameters=parameters, tokens=tokens)
    return fit.a / parameters**fit.alpha, fit.b / tokens**fit.beta


check_public(globals())
