"""A scaling law fitted to runs, and how far it moves when one size is left out.

Hoffmann et al. 2022 (arXiv:2203.15556, section 3.3) minimize a Huber loss of log L over five
constants by a search that may stop early (Besiroglu et al. 2024). Here the two exponents are tried on
a grid, and E, A and B follow by least squares of the relative error: nothing can stop early
(variable projection).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.checked import check_public

from .scaling import ScalingLaw

__all__ = ["fit_law", "leave_one_out"]

Run = tuple[float, float, float]  # parameters, tokens, loss
EXPONENTS = (0.05, 1.5)
NO_LAW = (
    "fit_law: these losses do not fall with size and with tokens, as the law does. Is each model "
    "trained at a learning rate that suits it?"
)


def fit_law(runs: Sequence[Run], source: str = "fitted") -> ScalingLaw:
    """The law whose relative errors over these runs are least.

    Args:
        runs: (parameters, tokens, loss) of each.
        source: What the law is to say about its origin.

    Raises:
        ValueError: a value not above zero, or fewer than 3 sizes or 3 amounts of tokens: the law
            has a curve in both.
    """
    table = np.asarray(runs, dtype=float).reshape(-1, 3)
    if not (np.isfinite(table) & (table > 0)).all():
        raise ValueError("fit_law: parameters, tokens and losses must be finite and above zero.")
    for column, name in ((0, "sizes of model"), (1, "amounts of tokens")):
        if (there := len(set(table[:, column]))) < 3:
            raise ValueError(f"fit_law: {there} {name}; a power law and a floor need 3 or more.")
    low, high = EXPONENTS
    alphas = betas = np.geomspace(low, high, 40)
    for reach in (1.2, 1.05, 1.01, 1.002):  # each time around the best, and finer
        alpha, beta, _ = _best(table, alphas, betas)
        alphas, betas = (
            np.clip(np.geomspace(near / reach, near * reach, 40), low, high)
            for near in (alpha, beta)
        )
    alpha, beta, (e, a, b) = _best(table, alphas, betas)
    law = ScalingLaw(float(e), float(a), float(b), float(alpha), float(beta), source)
    inverse = 1 / table[:, 2]
    of_a_constant = ((inverse * inverse.sum() / (inverse**2).sum() - 1) ** 2).sum()
    if sum((law.loss(n, d) / loss - 1) ** 2 for n, d, loss in table) >= of_a_constant:
        raise ValueError(NO_LAW)
    return law


def leave_one_out(runs: Sequence[Run]) -> list[ScalingLaw]:
    """The law without each size in turn: how far one model moves it.

    Raises:
        ValueError: as `fit_law`, for fewer than 4 sizes.
    """
    sizes = sorted({run[0] for run in runs})
    return [
        fit_law([run for run in runs if run[0] != size], f"without {size:,.0f}") for size in sizes
    ]


def _best(
    table: np.ndarray, alphas: np.ndarray, betas: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """The exponents of a grid with the least error, and E, A, B for them."""
    parameters, tokens, losses = table.T
    grid = [(alpha, beta) for alpha in alphas for beta in betas]
    best: tuple[float, float, float, np.ndarray] | None = None
    for columns in ((0, 1, 2), (1, 2)):  # with a floor, and without where it would be below zero
        parts = np.stack(
            [np.stack([np.ones_like(losses), parameters**-a, tokens**-b], axis=1) for a, b in grid]
        )[:, :, list(columns)]
        scaled = parts / losses[None, :, None]
        size = np.linalg.norm(scaled, axis=1, keepdims=True)
        unit = scaled / size
        normal = np.einsum("gnk,gnl->gkl", unit, unit) + 1e-12 * np.eye(len(columns))
        found = np.linalg.solve(normal, unit.sum(axis=1)[..., None])[..., 0]
        errors = ((np.einsum("gnk,gk->gn", unit, found) - 1) ** 2).sum(axis=1)
        errors[(found <= 0).any(axis=1)] = np.inf
        row = int(np.argmin(errors))
        if np.isfinite(errors[row]) and (best is None or errors[row] < best[0]):
            constants = np.zeros(3)
            constants[list(columns)] = found[row] / size[row, 0]
            best = (float(errors[row]), *grid[row], constants)
    if best is None:
        raise ValueError(NO_LAW)
    return best[1], best[2], best[3]


check_public(globals())
