"""Days, dollars and failures of a plan."""

import math

import pytest
from plan_cases import BATCH, BIG, GPT, cluster_of, estimated

from utils.planner import (
    Cluster,
    Plan,
    cost,
    estimate,
    goodput,
)
from utils.planner.goodput import best_interval_seconds, working_share


def test_prices_scale_dollars_and_tokens_scale_days():
    cheap, dear = (
        estimate(GPT, cluster_of(8, usd_per_gpu_hour=usd), Plan(dp=8), BATCH) for usd in (1.5, 3.0)
    )
    one, two = cost(cheap, 1e9), cost(dear, 1e9)
    assert two.usd - two.storage_usd == pytest.approx(2 * (one.usd - one.storage_usd))
    assert two.storage_usd == pytest.approx(one.storage_usd)
    assert cost(cheap, 3e9).days == pytest.approx(3 * one.days)
    assert one.days_interval[0] < one.days < one.days_interval[1]
    assert one.gpu_hours == pytest.approx(24 * 8 * one.days)
    assert one.price_source == "given with the cluster"
    listed = cost(estimate(GPT, cluster_of(8), Plan(dp=8), BATCH), 1e9)
    assert listed.usd_per_gpu_hour > 0
    assert listed.price_source != one.price_source


def test_175b_on_64_gpus_takes_about_a_year_for_300b_tokens():
    found = estimate(BIG, cluster_of(64), Plan(tp=8, pp=8, sequence_parallel=True), BATCH)
    assert found.fits
    assert 200 < cost(found, 300e9).days < 500


def test_young_and_daly():
    day = 86_400.0
    young = (2 * 60 * 30 * day) ** 0.5
    assert best_interval_seconds(60, 30 * day) == pytest.approx(young, rel=0.01)
    best = best_interval_seconds(60, day)
    share = working_share(best, 60, 300, day)
    for other in (best / 2, 2 * best):
        assert working_share(other, 60, 300, day) < share
    assert best_interval_seconds(100, 10) == 10


def test_larger_clusters_fail_more_and_keep_less():
    small, large = (goodput(Cluster(gpu="H100", nodes=nodes)) for nodes in (8, 2048))
    assert 0 < large.share[0] < large.share[1] < small.share[1] < 1
    assert large.seconds_between_failures[0] < small.seconds_between_failures[0]


def test_a_cluster_that_always_fails_keeps_nothing():
    """A failure every 0.03 s, and 300 s to restart: e^10000 overflows, its inverse is 0."""
    left = goodput(Cluster(gpu="H100", nodes=10**8))
    assert left.share == (0.0, 0.0)
    assert left.seconds_between_failures[0] == pytest.approx(0.03456)
    with pytest.raises(ValueError, match="leave no time to train. Use fewer nodes"):
        cost(estimated(dp=8), 1e9, left)


def test_the_working_share_is_dalys():
    for mean in (1e3, 1e5, 1e7):
        spent = mean * math.exp(300 / mean) * math.expm1((600 + 10) / mean)
        assert working_share(600, 10, 300, mean) == pytest.approx(600 / spent, rel=1e-12)
