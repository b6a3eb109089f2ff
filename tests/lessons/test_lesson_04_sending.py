"""DDP's buckets and when they travel: predictions of lesson 04."""

from __future__ import annotations

from functools import partial

import pytest

from utils import resnet
from utils.lessons.lesson_04.figures import draw_ring
from utils.lessons.lesson_04.sending import Bucket, buckets_of, timetable
from utils.units import MIB

TWO = [Bucket(300, 0.0), Bucket(100, 1.0)]


def test_resnet_50s_buckets_hold_every_gradient_once():
    make = partial(resnet, 50, stem="imagenet", num_classes=1000)
    found = buckets_of(make, (1, 3, 224, 224))
    payload_bytes = sum(bucket.payload_bytes for bucket in found)
    assert payload_bytes == sum(4 * p.numel() for p in make().parameters())
    assert all(bucket.payload_bytes >= 25 * MIB for bucket in found[1:-1]), "filled to the cap"
    shares = [bucket.ready_share for bucket in found]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_fast_link_leaves_the_last_bucket_alone():
    # Two ranks: a ring's factor is 1.
    spans = timetable(TWO, backward_seconds=10.0, ranks=2, link_bytes_per_second=100.0)
    assert spans == [(0.0, 3.0), (10.0, 11.0)]


def test_on_a_slow_link_buckets_queue():
    spans = timetable(TWO, backward_seconds=10.0, ranks=2, link_bytes_per_second=25.0)
    assert spans == [(0.0, 12.0), (12.0, 16.0)]


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_ring_sends_more_with_more_ranks(ranks: int, factor: float):
    ((start, end),) = timetable([Bucket(100, 0.0)], 1.0, ranks, 100.0)
    assert end - start == pytest.approx(factor)


def test_the_drawn_ring_sums_every_share_and_brings_it_to_all():
    (axes,) = draw_ring().axes
    boxes = [
        (*text.get_position(), text.get_text()) for text in axes.texts if ":" in text.get_text()
    ]
    for hop in range(7):
        passed = sorted(said for x, _, said in boxes if x == hop)
        assert [said[0] for said in passed] == list("ABCD"), "each share is with one rank"
        ranks = {len(said.partition(": ")[2].split("+")) for said in passed if "sum" not in said}
        assert ranks == ({hop + 1} if hop < 3 else set()), "a hop adds one rank's part"
    for rank in range(4):
        sums = {said for _, y, said in boxes if y == -rank and "sum" in said}
        assert len(sums) == 4, "a rank ends with all sums"
