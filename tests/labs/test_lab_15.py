"""What lab 15's exercises stand on: the broken plans that its text shows, and a premise."""

from __future__ import annotations

from lab_cases import solved_lab

from utils.catalog import model_shape
from utils.lessons.lesson_15 import checks as lab_15
from utils.planner import Plan, estimate


def test_the_lab_shows_what_the_check_asks() -> None:
    text = solved_lab("advanced/15_design_studio").read_text(encoding="utf-8")
    assert "Plan(tp=4, pp=16, sequence_parallel=True, micro_batch=2)" in text
    assert "broken = Plan(tp=4, pp=16)" in text and Plan(tp=4, pp=16) == lab_15.TO_FIX
    assert 'small_cards = Cluster(gpu="A100-40GB", nodes=8)' in text and "layers=56" in text
    found = estimate(model_shape(lab_15.MODEL), lab_15.the_cluster(), lab_15.OOM_PLAN, lab_15.BATCH)
    assert not found.fits


def test_the_premise_is_the_planners() -> None:
    alone = lab_15._a10_alone()
    assert not alone.fits and alone.peak.state_bytes > 200e9
