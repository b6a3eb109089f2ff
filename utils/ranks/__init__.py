"""Functions in processes of their own: one that can be killed, which is what many are made of."""

from utils.ranks.killable import KillableProcess, run_killable, run_to_outcome
from utils.ranks.outcome import ChildError, Failure, Outcome

__all__ = ["ChildError", "Failure", "KillableProcess", "Outcome", "run_killable", "run_to_outcome"]
