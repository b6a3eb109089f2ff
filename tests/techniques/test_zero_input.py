"""ZeRO by DeepSpeed: configurations and machines that cannot be, each with its sentence."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from zero_cases import adamw, model, parameter_sizes

from utils.ranks import RankError, run_ranks
from utils.techniques.deepspeed import deepspeed_missing, deepspeed_problem, load_deepspeed
from utils.techniques.deepspeed_config import read_config
from utils.techniques.zero import SETTINGS, zero_config, zero_engine

P = sum(parameter_sizes())
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(bool(deepspeed_missing()), reason=str(deepspeed_missing())),
]


@pytest.fixture(autouse=True, scope="module")
def deepspeed_ready() -> None:
    """Loaded here with its extension, so that ranks get it ready-made."""
    assert deepspeed_problem() is None


def test_a_contradiction_in_the_batch_is_a_sentence():
    config = {**zero_config(1, P, world_size=4, micro_batch=2), "train_batch_size": 12}
    assert config["train_micro_batch_size_per_gpu"] == 2
    with pytest.raises(
        ValueError, match=r"2 x gradient_accumulation_steps 1 x 4 ranks is 8, .* 12"
    ):
        read_config(config, 4)
    with pytest.raises(ValueError, match="micro_batch.* is 0; it must be a whole number"):
        zero_config(1, P, world_size=4, micro_batch=0)


def test_an_unknown_key_is_a_sentence_with_the_nearest():
    with pytest.raises(ValueError, match="no setting 'reduce_bucket_sizes'.*reduce_bucket_size"):
        zero_config(2, P, world_size=4, reduce_bucket_sizes=5)
    config = zero_config(2, P, world_size=4)
    with pytest.raises(ValueError, match="no setting 'zero_optimisation'.*zero_optimization"):
        read_config({**config, "zero_optimisation": {}}, 4)
    with pytest.raises(ValueError, match="zero_optimization is True; it is a mapping"):
        read_config({**config, "zero_optimization": True}, 4)
    with pytest.raises(ValueError, match="stage is 4; ZeRO has the stages 1, 2 and 3"):
        zero_config(4, P, world_size=4)
    with pytest.raises(ValueError, match="write 'bf16' or 'fp32'"):
        zero_config(1, P, world_size=4, precision="fp8")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_own_class_reads_the_configuration(stage):
    config = zero_config(stage, P, world_size=4, micro_batch=2, accumulation=3)
    read = read_config(config, 4)
    assert (read.zero_optimization_stage, read.train_batch_size) == (stage, 24)


def test_every_setting_is_explained():
    for stage in (1, 2, 3):
        config = zero_config(stage, P, world_size=4)
        assert {*config, *config["zero_optimization"]} - {"zero_optimization"} <= set(SETTINGS)


def test_without_deepspeed_it_says_what_is_skipped(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "deepspeed" else found(n, *a)
    )
    deepspeed_problem.cache_clear()
    assert "not installed" in deepspeed_problem() and "skipped" in deepspeed_problem()
    deepspeed_problem.cache_clear()


def test_without_a_compiler_it_says_what_is_skipped(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    deepspeed_problem.cache_clear()
    assert "No C++ compiler" in deepspeed_problem() and "skipped" in deepspeed_problem()
    deepspeed_problem.cache_clear()


def test_no_group_is_a_sentence():
    with pytest.raises(ValueError, match="worker of run_ranks"):
        network = model()
        zero_engine(network, adamw(network.parameters()), zero_config(1, P, world_size=1))


def test_a_failed_build_is_a_sentence(monkeypatch):
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()

    class Broken:
        def is_compatible(self):
            return True

        def load(self, verbose):
            raise RuntimeError("Error building extension\nmore")

    monkeypatch.setattr(type(accelerator), "create_op_builder", lambda *_: Broken())
    deepspeed_problem.cache_clear()
    problem = deepspeed_problem() or ""
    assert "could not be compiled, so cells that run ZeRO are skipped" in problem
    assert "Error building extension" in problem
    deepspeed_problem.cache_clear()


def test_deepspeed_keeps_the_device_that_it_was_loaded_for(monkeypatch):
    assert load_deepspeed("cpu") is load_deepspeed()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # restored afterwards
    with pytest.raises(RuntimeError, match="loaded for 'cpu' .* 'cuda' is wanted .* Restart"):
        load_deepspeed("cuda")


def on_another_device() -> None:
    network = model().to("meta")
    zero_engine(network, adamw(network.parameters()), zero_config(1, P, world_size=1))


def test_a_model_on_another_device_is_a_sentence():
    with pytest.raises(RankError, match="lies on 'meta', and DeepSpeed computes on 'cpu'"):
        run_ranks(on_another_device, 1, timeout_seconds=60)
