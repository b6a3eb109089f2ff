"""`search`: the best plan of all, exactly, and fast because most are ruled out by a bound."""

from __future__ import annotations

from utils.catalog import ModelShape, model_shape
from utils.catalog.rules import of_kind, one_of
from utils.planner.batch import Batch
from utils.planner.branch_and_bound import BranchAndBound, Plans
from utils.planner.candidates import candidates
from utils.planner.cluster import Cluster
from utils.planner.space import DEFAULT, Space, Task

__all__ = ["Plans", "Space", "candidates", "search"]

OBJECTIVES = ("seconds", "bytes")


def search(
    model: ModelShape | str,
    cluster: Cluster,
    batch: Batch | list[Batch] | tuple[Batch, ...],
    objective: str = "seconds",
    space: Space = DEFAULT,
) -> Plans:
    """The best plan for a model, a cluster and a batch.

    Args:
        model: What is trained: a shape, or a name of the catalog.
        cluster: On what; every plan uses all of it.
        batch: The global batch; or several, of which the best in seconds a token is taken.
        objective: "seconds" of a step (so dollars as well), or "bytes" of the fullest GPU.
        space: The choices to combine.

    Raises:
        ValueError: an unknown objective, no batch, or no combination is even valid.
    """
    model, found = model_shape(model), []
    batches = batch if isinstance(batch, (list, tuple)) else [batch]
    if not batches:
        raise ValueError("search needs a batch: Batch(sequences=512, sequence_length=4096).")
    for one in batches:
        of_kind("search", cluster=(cluster, Cluster), batch=(one, Batch), space=(space, Space))
        one_of("objective", objective, OBJECTIVES)
        found.append(BranchAndBound(Task(model, cluster, one, space)).answer(objective))
    return _best_of(found, objective)


def _best_of(found: list[Plans], objective: str) -> Plans:
    def worth(plans: Plans) -> tuple[float, float]:
        assert plans.best is not None
        speed, needed = -plans.best.tokens_per_second, plans.best.peak.needed_bytes
        return (speed, needed) if objective == "seconds" else (needed, speed)

    return min((plans for plans in found if plans.best), key=worth, default=found[0])
