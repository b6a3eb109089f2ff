"""Labs: checks of answers, the learner's copies, and the running scoreboard."""

from utils.checked import check_public
from utils.labs.checking import check
from utils.labs.verdict import Report, Status, Verdict, correct, not_yet

__all__ = ["Report", "Status", "Verdict", "check", "correct", "not_yet"]

check_public(globals())
