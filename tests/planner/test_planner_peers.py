"""Other planners are asked in their own words, and left out where they are not installed."""

import sys
from types import SimpleNamespace

from evidence.validation import (
    bloom,
    peers,
)
from utils.catalog import model_shape
from utils.planner import Batch, Plan, memory, worst


def test_tools_that_are_not_installed_are_left_out(monkeypatch):
    def missing(*asked):
        raise ImportError("not installed")

    def half(model, plan, batch, gpu):
        return worst(memory(model, plan, batch)).device_bytes / 2

    monkeypatch.setattr(peers, "TOOLS", {"missing": missing, "half": half})
    found = peers.compare_peers()
    assert {row.tool for row in found} == {"this planner", "half"}
    bloom_rows = {row.tool: row for row in found if row.source == "BLOOM prequel"}
    assert bloom_rows["half"].median > 0.4
    assert bloom_rows["this planner"].median < 0.05


def test_megatron_bridge_is_asked_with_its_own_words(monkeypatch):
    name = "megatron.bridge.training.utils.theoretical_memory_utils"
    asked = []

    def activations(config, micro_batches):
        asked.append((config.model, config.train.micro_batch_size, micro_batches))
        return 1.0

    module = SimpleNamespace(
        F=SimpleNamespace(),
        compute_activation_memory=activations,
        compute_weight_and_optimizer_memory=lambda config: 1000.0 * config.data_parallel_size,
    )
    monkeypatch.setitem(sys.modules, name, module)
    plan = Plan(dp=2, tp=4, pp=4, zero_stage=1, micro_batch=2)
    shape = model_shape("megatron-7.5b")
    batch = Batch(sequences=16, sequence_length=2048)
    said = peers.megatron_bridge_bytes(shape, plan, batch, bloom.GPU)
    assert said == 2001.0
    words, micro_batch, micro_batches = asked[0]
    assert (words.hidden_size, words.tensor_model_parallel_size) == (shape.hidden, 4)
    assert words.virtual_pipeline_model_parallel_size is None
    assert (micro_batch, micro_batches) == (2, 4)
