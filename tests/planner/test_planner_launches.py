"""The host's time to launch eager code: counted, documented, hidden where the device is slower."""

import pytest

from evidence.validation import eager, launches
from utils.catalog import device, model_shape
from utils.planner import Batch, Cluster, Lora, Plan, step_time
from utils.planner.launches import DECODED_LAUNCHES, EAGER, LAUNCH_SECONDS
from utils.planner.step_seconds.adapter_time import adapter_seconds

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

ONE = Cluster(gpu="A100 80GB", nodes=1, gpus_per_node=1)


def test_counts_are_those_of_the_code_itself():
    plain = launches.training()
    assert plain.block == EAGER.passes(None, 7)
    assert plain.ends == (EAGER.ends, EAGER.ends)
    assert launches.decoding() == DECODED_LAUNCHES


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_adapters_launch_what_is_counted(dropout):
    lora = Lora(targets=("q", "v"), adapter_dropout=dropout > 0)
    assert launches.training(("q_proj", "v_proj"), dropout).block == EAGER.passes(lora, 7)


def test_launches_are_hidden_behind_long_sequences_and_bind_at_short_ones():
    plan = Plan(framework="transformers")
    short, long = (
        step_time("llama-2-7b", ONE, plan, Batch(sequences=1, sequence_length=s))
        for s in (32, 4096)
    )
    assert short.launch > 0
    assert long.launch == 0.0
    least = 32 * sum(EAGER.passes(None, 7)) * LAUNCH_SECONDS
    assert short.total >= least


def test_checkpointing_and_quantized_matrices_launch_more():
    batch = Batch(sequences=1, sequence_length=32)
    plans = [
        Plan(framework="peft", lora=Lora(base=base), recompute=recompute)
        for base, recompute in (("bf16", "none"), ("bf16", "full"), ("nf4", "full"))
    ]
    seconds = [step_time("llama-2-7b", ONE, plan, batch).total for plan in plans]
    assert seconds == sorted(set(seconds))


def test_fused_frameworks_count_no_launches():
    assert Plan(framework="megatron").conventions.launches is None


def test_no_row_is_outside_of_the_interval_that_is_printed():
    for row, found in eager.with_estimates():
        low, high = found.step_seconds_interval
        assert low <= row.published <= high, row.case


def test_autocast_casts_around_the_dropout_and_multiplies_in_16_bits() -> None:
    """Beside adapters in 16 bits the device moves more, and multiplies no more."""
    gpu, shape = device("A100-80GB"), model_shape("llama-2-7b")
    plain, cast, full = (
        Lora(rank=64, adapter_dropout=True, adapter_bytes=size, autocast=how)
        for size, how in ((2, False), (4, True), (4, False))
    )
    seconds = {
        name: adapter_seconds(gpu, shape, lora, 8192.0)
        for name, lora in (("plain", plain), ("cast", cast), ("full", full))
    }
    for way in (0, 1):
        assert seconds["cast"][way][0] == seconds["plain"][way][0] < seconds["full"][way][0]
        assert seconds["cast"][way][1] > seconds["plain"][way][1]
