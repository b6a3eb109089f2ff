"""Checks of lesson and lab 18, "Long contexts"."""

from __future__ import annotations

from utils.labs.cases import Question
from utils.labs.kinds import number, whole

rank_0_percent = Question(
    "Lesson 18: the share of a ring's time that the first of sixteen ranks works, tokens in order.",
    number("a number of percent"),
    right=100 / 31,
    relative=0.05,
    wrong={
        100 / 16: "That is 1 of 16 rounds. Rank 0 has half a square, and the last rank 15.5.",
        100 / 32: "That counts 16 rounds of a whole square. The last rank's own square is half masked.",
        50: "That is its work in its one round. The others' rounds take time, too.",
    },
    nudge="How many squares does rank 0 compute, and how many the last rank, which sets the time?",
    note="half a square of 15.5: 3.2%",
)

most_ranks = Question(
    "Lesson 18: ranks over which Ulysses can share a sequence of Qwen2.5-7B, of eight.",
    whole("a number of ranks"),
    right=4,
    wrong={
        7: "Seven divide 28 query heads. But 4 key-value heads over 7 ranks are neither whole heads nor whole copies.",
        8: "28 query heads over 8 ranks would be 3.5 each.",
        28: "A node has eight GPUs.",
        2: "Two can. Is there a larger number that divides 28, and shares 4 key-value heads?",
    },
    nudge="It must divide the 28 query heads, and the key-value heads as heads or as copies.",
    note="7 query heads and one key-value head each",
)
