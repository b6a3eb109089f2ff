"""Shapes of models: counted as their checkpoints hold them, and found by their names."""

from dataclasses import replace

import pytest

from utils.catalog import (
    MODELS,
    device,
    link,
    model_shape,
)
from utils.catalog.hub_models import hub_names, hub_shape


@pytest.mark.parametrize("shape", MODELS.values(), ids=list(MODELS))
def test_computed_parameters_are_the_published_ones(shape):
    difference = abs(shape.parameter_count - shape.published_count)
    assert difference <= (shape.published_step / 2 if shape.published_step > 1 else 0)
    assert shape.source


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("bloom-176b", 176_247_271_424),
        ("llama-3.1-405b", 405_853_388_800),
    ],
)
def test_exact_counts(name, count):
    assert MODELS[name].parameter_count == count


HUB_SHAPES = {name: shape for name in hub_names() if (shape := hub_shape(name))}


@pytest.mark.parametrize("shape", HUB_SHAPES.values(), ids=list(HUB_SHAPES))
def test_shapes_of_the_hub_s_configurations_count_what_its_checkpoints_hold(shape):
    """OLMo 2 alone differs: its norms of queries and keys span all heads, 0.004% of its weights."""
    assert shape.parameter_count == pytest.approx(shape.published_count, rel=4e-5)
    assert shape.parameter_count == shape.published_count or "OLMo" in shape.name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),  # a row of the catalog under the Hub's name
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama 2 7B", "llama-2-7b"),
    ],
)
def test_a_model_is_found_by_its_name_on_the_hub(name, found):
    assert model_shape(name).name == found


def test_what_two_tables_know_they_know_alike():
    for row, full in {
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "llama-2-13b": "meta-llama/Llama-2-13b-hf",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "qwen2.5-7b": "Qwen/Qwen2.5-7B",
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    }.items():
        known = {key: getattr(MODELS[row], key) for key in ("name", "max_sequence", "source")}
        ours = replace(MODELS[row], head_width=MODELS[row].head_dim)
        assert ours == replace(HUB_SHAPES[full], head_width=ours.head_dim, **known)


def test_a_model_of_another_kind_is_told_where_it_can_be_tried():
    with pytest.raises(ValueError, match=r"openai/whisper-large-v3 is no decoder .* fit_model"):
        model_shape("openai/whisper-large-v3")
    with pytest.raises(ValueError, match=r"No model is called 'Qwen/Qwen9-8B'.*Qwen/Qwen3-8B"):
        model_shape("Qwen/Qwen9-8B")


def test_parts_of_gpt2_by_hand():
    h = 768
    assert MODELS["gpt2-124m"].parameter_counts() == {
        "embedding": (50_257 + 1024) * h,
        "attention": 12 * (h * 3 * h + 3 * h + h * h + h),
        "mlp": 12 * (h * 4 * h + 4 * h + 4 * h * h + h),
        "norms": (12 * 2 + 1) * 2 * h,
        "head": 0,
    }


def test_grouped_queries_and_biases_change_attention_alone():
    dense, grouped, biased = (model_shape("llama-2-7b") for _ in range(3))
    grouped = replace(dense, kv_heads=8)
    biased = replace(dense, qkv_bias=True)
    saved = dense.layer_parameter_counts()["attention"]
    assert saved - grouped.layer_parameter_counts()["attention"] == 2 * 4096 * 24 * 128
    assert biased.parameter_count - dense.parameter_count == 32 * 3 * 4096
    assert grouped.layer_parameter_counts()["mlp"] == dense.layer_parameter_counts()["mlp"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"family": "rnn"}, "family is 'rnn'; write one of 'gpt', 'llama'"),
        ({"positions": "sine"}, "positions is 'sine'; write one of 'learned', 'rotary', 'alibi'"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": 33}, "33 heads do not divide 4096"),
        ({"kv_heads": 5}, "5 key-value heads"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be 1 or more"),
        ({"kv_heads": -1}, "kv_heads is -1; it must be 1 or more"),
        ({"layers": float("nan")}, "layers is nan; it must be a whole number"),
        ({"layers": 2.5}, "layers is 2.5; .*Nearest: 2 or 3"),
        ({"hidden": "4096"}, "without quotes: 4096"),
        ({"extra_positions": -2}, "extra_positions is -2; it must be 0 or more"),
    ],
)
def test_impossible_shapes_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(model_shape("llama-2-7b"), **change)


def test_a_shape_stands_for_itself_and_other_kinds_are_refused():
    mine = replace(model_shape("llama-2-7b"), name="mine", layers=2)
    assert model_shape(mine) is mine
    with pytest.raises(ValueError, match="name is 7; it must be of type str or ModelShape"):
        model_shape(7)


@pytest.mark.parametrize(
    ("look_up", "spelling", "name"),
    [
        (device, "rtx4090", "RTX 4090"),
        (device, " A100 80GB", "A100-80GB"),
        (device, "h100", "H100"),
        (link, "nvlink3", "NVLink 3"),
        (link, "pcie 4 X16", "PCIe 4 x16"),
        (model_shape, "Llama 2 7B", "llama-2-7b"),
    ],
)
def test_case_and_spaces_do_not_matter(look_up, spelling, name):
    assert look_up(spelling).name == name


@pytest.mark.parametrize(
    ("look_up", "wrong", "nearest"),
    [
        (device, "A100", "A100-80GB"),
        (device, "H20", "H200"),
        (link, "NVLink 9", "NVLink 4"),
        (model_shape, "llama7b", "llama-2-7b"),
        (model_shape, "", "gpt2-124m"),
    ],
)
def test_an_unknown_name_gets_the_nearest(look_up, wrong, nearest):
    with pytest.raises(ValueError, match=nearest):
        look_up(wrong)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts": 8}, "experts_per_token is not given"),
        ({"num_experts": 8, "experts_per_token": 9}, "experts_per_token is 9, more than the 8"),
        ({"experts_per_token": 2}, "experts_per_token needs experts"),
        ({"shared_feedforward": 64}, "shared_feedforward needs experts"),
        ({"num_experts": 8, "experts_per_token": 2, "dense_layers": 32}, "none has experts.*31"),
    ],
)
def test_impossible_experts_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(model_shape("llama-2-7b"), **change)


def test_experts_that_a_token_does_not_meet_are_idle():
    mixtral = model_shape("mixtral-8x7b")
    one = 3 * 4096 * 14_336
    assert mixtral.parameter_count - mixtral.active_parameter_count == 32 * 6 * one
    assert model_shape("llama-2-7b").active_parameter_count == 6_738_415_616
