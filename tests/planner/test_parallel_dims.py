"""The one vocabulary of axes: order, places, groups, and the sentences for what cannot be."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.parallel.dims import AXES, DATA_AXES, ParallelDims
from utils.planner import Plan

SIZES = st.builds(ParallelDims, **{axis: st.integers(1, 3) for axis in AXES})


def test_neighbours_share_the_tensor_parallel_group():
    dims = ParallelDims(pp=2, shard=2, tp=2)
    assert dims.ranks == 8
    assert dims.group(0, "tp") == (0, 1)
    assert dims.group(0, "shard") == (0, 2)
    assert dims.group(5, "pp") == (1, 5)
    assert dims.group(7, "pp", "tp") == (2, 3, 6, 7)
    assert dims.mesh == {"pp": 2, "shard": 2, "tp": 2}
    assert str(dims) == "pp 2 x shard 2 x tp 2"


def test_a_mesh_always_has_the_axis_that_fsdp_shards_over():
    assert ParallelDims().mesh == {"shard": 1}
    assert ParallelDims(replicate=4).mesh == {"replicate": 4, "shard": 1}
    assert str(ParallelDims()) == "one rank"


@settings(deadline=None)
@given(dims=SIZES, data=st.data())
def test_places_and_ranks_are_each_others_inverse(dims, data):
    rank = data.draw(st.integers(0, dims.ranks - 1))
    place = dims.coordinates(rank)
    assert list(place) == list(AXES)
    assert dims.rank(**place) == rank
    # The order in which init_device_mesh numbers ranks: the last axis is the fastest.
    strides = [math.prod(list(dims.sizes.values())[i + 1 :]) for i in range(len(AXES))]
    assert rank == sum(n * s for n, s in zip(place.values(), strides, strict=True))


@settings(deadline=None)
@given(dims=SIZES, axes=st.sets(st.sampled_from(AXES)))
def test_groups_part_the_world(dims, axes):
    groups = {dims.group(rank, *axes) for rank in range(dims.ranks)}
    assert sorted(rank for group in groups for rank in group) == list(range(dims.ranks))
    assert {len(group) for group in groups} == {math.prod(dims.sizes[axis] for axis in axes)}
    for group in groups:
        assert all(group == dims.group(rank, *axes) for rank in group)


@settings(deadline=None)
@given(dims=SIZES)
def test_ranks_that_share_rows_are_those_that_differ_outside_of_the_data(dims):
    readers = [dims.data_rank(rank) for rank in range(dims.ranks)]
    assert set(readers) == set(range(dims.data_ranks))
    for rank in range(dims.ranks):
        alike = dims.group(rank, *(axis for axis in AXES if axis not in DATA_AXES))
        assert {readers[other] for other in alike} == {readers[rank]}
        apart = dims.group(rank, *DATA_AXES)
        assert [readers[other] for other in apart] == list(range(dims.data_ranks))


@settings(deadline=None)
@given(dims=SIZES)
def test_cp_counts_as_more_ranks_to_shard_over(dims):
    folded = dims.with_cp_in("shard")
    assert (folded.ranks, folded.shard, folded.cp) == (dims.ranks, dims.shard * dims.cp, 1)
    for rank in range(dims.ranks):
        assert folded.group(rank, "shard") == dims.group(rank, "shard", "cp")
        assert folded.group(rank, "tp") == dims.group(rank, "tp")


def test_cp_counts_as_replicas_where_nothing_is_sharded():
    dims = ParallelDims(replicate=2, cp=2, tp=2)
    assert dims.with_cp_in("replicate") == ParallelDims(replicate=4, tp=2)
    with pytest.raises(ValueError, match=re.escape("write 'shard'")):
        ParallelDims(shard=2, cp=2).with_cp_in("replicate")


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True, float("nan")])
@pytest.mark.parametrize("axis", AXES)
def test_sizes_are_counts(axis, size):
    with pytest.raises(ValueError, match=re.escape(f"{axis} is {size!r}; write a whole number")):
        ParallelDims(**{axis: size})


BAD = [
    (lambda d: d.coordinates(8), "rank 8 is outside: pp 2 x shard 2 x tp 2 has ranks 0 to 7"),
    (lambda d: d.coordinates(-1), "rank -1 is outside"),
    (lambda d: d.rank(tp=2), "tp is 2, and pp 2 x shard 2 x tp 2 has places 0 to 1 there"),
    (lambda d: d.rank(dp=0), "There is no axis 'dp'; write one of 'pp', 'replicate', 'shard'"),
    (lambda d: d.group(0, "ep"), "There is no axis 'ep'"),
    (lambda d: d.with_cp_in("tp"), "cp cannot be counted along 'tp'"),
    (lambda d: d.check_world(4), "needs 8 ranks, and 4 are here. Start 8, or change a size"),
    (lambda d: d.check_world(1), "needs 8 ranks, and 1 is here"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_is_a_sentence(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(ParallelDims(pp=2, shard=2, tp=2))


def test_the_world_that_fits_passes():
    ParallelDims(pp=2, shard=2, tp=2).check_world(8)


def test_a_plans_sharding_follows_cp():
    assert Plan(dp=2, cp=2, zero_stage=3).dims == ParallelDims(shard=2, cp=2)
    assert Plan(dp=2, cp=2).dims == ParallelDims(replicate=2, cp=2)
    assert Plan(dp=2, cp=2, zero_stage=1, shard_ranks=2).dims == ParallelDims(replicate=2, cp=2)
    with pytest.raises(ValueError, match=re.escape("cp is 4 and does not divide 2 (shard_ranks)")):
        Plan(dp=2, cp=4, zero_stage=1, shard_ranks=2).dims  # noqa: B018


def test_dims_need_no_torch():
    code = "import sys, utils.parallel.dims; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
