"""DeepSpeed's own configuration class reads what `export` writes."""

from __future__ import annotations

import pytest
from export_cases import CASES, HALF, MIXED, tiny

pytestmark = pytest.mark.deepspeed


RUN = [found for found in (*CASES.values(), MIXED, HALF) if found.deepspeed is not None]


@pytest.mark.parametrize("found", RUN)
def test_deepspeed_accepts_the_configuration(found, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return found.plan.dp

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    read = DeepSpeedConfig(found.deepspeed, mpu=Ranks())
    assert read.world_size == found.plan.dp
    assert read.zero_optimization_stage >= found.plan.zero_stage
    assert read.train_batch_size == found.batch.sequences
    accumulated = read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps
    assert read.train_batch_size == accumulated * read.world_size
    assert (read.zero_config.offload_param is not None) == (found.plan.offload == "parameters")


def test_deepspeed_refuses_a_batch_that_does_not_multiply_out():
    from deepspeed.runtime.config import DeepSpeedConfig

    assert tiny(dp=4).deepspeed is not None
    wrong = {**tiny(dp=4).deepspeed, "train_batch_size": 12}
    with pytest.raises(AssertionError, match="Check batch related parameters"):
        DeepSpeedConfig(wrong)
