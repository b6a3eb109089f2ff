"""What lab 12's three runs report, beside its exercises."""

from __future__ import annotations

from utils.lessons.lesson_12.workers import observed


def test_the_faults_show_in_what_the_ranks_report():
    """Each by a quantity that is exact: gradients right or far off, streams equal or not, masks."""
    a, b, c = (observed(run) for run in "ABC")
    for rank in a:
        wrong = {name for name, error in rank.gradient_errors.items() if error > 1e-6}
        assert wrong, "a missing sum leaves gradients wrong"
        behind = {name for name in rank.gradient_errors if name.startswith("blocks.1.")}
        assert {n for n in wrong if n in behind} == {
            "blocks.1.attention_norm.weight",
            "blocks.1.attention_norm.bias",
        }
    assert len({rank.stream for rank in a}) == len({rank.stream for rank in c}) == 1
    assert len({rank.stream for rank in b}) == 4, "each rank drops other elements of one stream"
    assert len({mask for rank in b for mask in rank.masks}) == 8
    assert len({mask for rank in c for mask in rank.masks}) == 2
