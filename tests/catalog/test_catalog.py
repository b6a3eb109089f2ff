"""The catalog's figures agree with what was published, and its look-ups help."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from datetime import date

import pytest

from utils.catalog import (
    DEVICES,
    LINKS,
    MODELS,
    device,
    link,
    model_shape,
    old_prices,
    price,
    price_table,
    read_prices,
)
from utils.catalog.__main__ import main as catalog_main
from utils.catalog.age import age_days, day_of, is_old
from utils.catalog.hub_models import hub_names, hub_shape
from utils.catalog.prices import COLUMNS
from utils.units import GB, GIB, MIB


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


def test_nvlink_is_per_direction():
    assert device("A100-80GB").peer_link.link_bytes_per_second == 300 * GB
    assert device("V100-16GB").peer_link.link_bytes_per_second == 150 * GB
    assert device("T4").peer_link == link("PCIe 3 x16")


def test_pcie_doubles_by_generation_and_loses_two_bits_in_130():
    rates = [link(f"PCIe {generation} x16").link_bytes_per_second for generation in (3, 4, 5)]
    assert rates[0] == pytest.approx(15.754e9, rel=1e-4)
    assert rates[1] == 2 * rates[0] and rates[2] == 4 * rates[0]


def test_network_ports_are_bytes_not_bits():
    assert link("InfiniBand HDR").link_bytes_per_second == 25 * GB
    assert link("InfiniBand NDR").link_bytes_per_second == 50 * GB


def test_every_figure_has_a_source():
    assert all(row.source for row in LINKS.values())
    for row in DEVICES.values():
        assert row.memory_source and row.flops_source
        assert (row.matmul_ceiling_tflops is None) == (row.ceiling_source == "")


@pytest.mark.parametrize("row", DEVICES.values(), ids=list(DEVICES))
def test_reported_memory_is_a_little_below_the_chips(row):
    # The label counts GiB up to 80 and on AMD's cards; NVIDIA's later 141 and 180 are GB.
    in_gib = row.memory_gb <= 80 or row.vendor == "AMD"
    chips = row.memory_gb * (GIB if in_gib else GB)
    share = row.memory_bytes / chips
    assert 0.91 < share < 1.07, (
        f"{row.name} reports {share:.2f} of what its label says: read memory_bytes again in devices.py"
    )
    assert row.memory_bytes % MIB == 0, f"{row.name}: a driver reports whole MiB"


@pytest.mark.parametrize("row", DEVICES.values(), ids=list(DEVICES))
def test_peaks_are_dense_and_ordered(row):
    both = (
        f"{row.name}: bf16 and tf32 came together, with capability 8.0; give both rates or neither"
    )
    assert row.bf16_native == (row.bf16_tflops is not None), both
    assert (row.tf32_tflops is not None) == row.bf16_native, both
    dense = (
        f"{row.name}: a sheet's rate 'with sparsity' is twice the dense one; write the dense one"
    )
    assert row.fp16_tflops >= 1.99 * row.fp32_tflops, dense
    twice = pytest.approx(2 * row.fp16_tflops, rel=0.01)
    assert row.fp8_tflops is None or row.fp8_tflops == twice, dense
    if row.matmul_ceiling_tflops is not None:
        share = row.matmul_ceiling_tflops / row.bf16_tflops
        assert 0.5 < share < 0.9, f"{row.name}: products are said to reach {share:.0%} of the peak"
    if row.fp8_ceiling_tflops is not None:
        assert row.ceiling_source, f"{row.name}: the fp8 ceiling has no source"
        assert 0.7 < row.fp8_ceiling_tflops / row.fp8_tflops < 0.8


def test_peak_by_name():
    assert device("A100-40GB").peak_flops_per_second("bf16") == 312e12
    with pytest.raises(ValueError, match="T4 has no units for 'bf16'; it has them for fp32, fp16"):
        device("T4").peak_flops_per_second("bf16")
    with pytest.raises(ValueError, match="int3"):
        device("H100").peak_flops_per_second("int3")


def test_rows_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        device("T4").memory_bytes = 0


def test_the_lowest_price_or_one_provider_s():
    assert price("h100").usd_per_gpu_hour == min(
        row.usd_per_gpu_hour for row in read_prices() if row.gpu == "H100" and row.kind != "spot"
    )
    assert price("H100", "Lambda").usd_per_gpu_hour == 3.99
    assert price("H100", "aws capacity block").usd_per_gpu_hour == 4.916
    assert all(row.as_of and row.source for row in read_prices())


def test_a_spot_price_is_never_the_lowest_unless_it_is_asked_for():
    assert price("H100", kind="spot").usd_per_gpu_hour < price("H100").usd_per_gpu_hour
    assert price("H100", kind="spot").kind == "spot"
    assert price("H100", kind="reserved").kind == "reserved"
    with pytest.raises(ValueError, match="kind is 'cheap'; write one of 'on demand', 'reserved'"):
        price("H100", kind="cheap")


def test_every_price_says_what_it_is_and_includes():
    assert {row.kind for row in read_prices()} == {"on demand", "reserved", "spot"}
    assert {row.fabric for row in read_prices()} <= {"yes", "no", "not stated"}


def test_todays_cards_and_links():
    assert {"H200", "B200", "B300", "GB200", "GB300", "MI300X"} <= set(DEVICES)
    assert link("InfiniBand XDR").link_bytes_per_second == 100 * GB
    assert device("H100").fp8_native and not device("H100").mxfp8_native
    assert device("B200").mxfp8_native and not device("A100-80GB").fp8_native


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


def test_unknown_prices_name_what_there_is():
    with pytest.raises(ValueError, match="No provider is called 'Initech'.*Lambda"):
        price("H100", "Initech")
    with pytest.raises(ValueError, match="No Lambda GPU is called 'H200'.*H100"):
        price("H200", "Lambda")


@pytest.mark.parametrize("dollars", ["-1", "0", "", "free", "inf", "nan"])
def test_a_price_must_be_above_zero(tmp_path, dollars):
    file = tmp_path / "mine.csv"
    file.write_text(f"# mine\n{','.join(COLUMNS)}\nMe,T4,1,{dollars},2026-11-21,me\n")
    with pytest.raises(ValueError, match="mine.csv, Me T4: usd_per_gpu_hour"):
        read_prices(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "lacks the columns provider"),
        ("provider,gpu,instance_gpus,usd_per_gpu_hour,as_of\n", "lacks the columns source"),
        (f"{','.join(COLUMNS)}\nMe,T4,1,2.0,,me\n", "as_of is empty"),
        (f"{','.join(COLUMNS)}\nMe,T4,1,2.0,today,me\n", "Me T4: as_of is 'today'.*without a date"),
        (f"{','.join(COLUMNS)}\nMe,T4,1,2.0,2026-13-01,me\n", "such as 2026-11-21"),
        (f"{','.join(COLUMNS)}\nMe,T4\n", "usd_per_gpu_hour is ''"),
    ],
)
def test_a_broken_price_file_says_what_it_lacks(tmp_path, text, sentence):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_prices(file)


LATER = date(2027, 11, 22)


def test_a_date_may_be_a_day_a_month_or_a_year():
    assert day_of("2026-11-21") == date(2026, 11, 21)
    assert day_of("2026-03") == date(2026, 3, 1) and day_of("2025") == date(2025, 1, 1)
    for wrong in ("commit 0f40703", "", "21.11.2026", "2026-02-30", "2026-1-1"):
        with pytest.raises(ValueError, match="as_of is"):
            day_of(wrong)


def test_a_price_is_old_after_a_year_and_not_before():
    assert not is_old("2026-11-21", date(2027, 11, 21)) and is_old("2026-11-21", LATER)
    assert age_days("2026-11-21", date(2026, 11, 22)) == 1
    assert age_days("2026-11-22", date(2026, 11, 21)) == 0, "another time zone is no error"


def test_old_prices_are_flagged_wherever_they_are_shown(capsys, tmp_path):
    lambda_s = price("H100", "Lambda")
    assert lambda_s.origin(date(2026, 11, 22)) == "Lambda, on demand, 2026-11-21"
    assert lambda_s.origin(LATER) == "Lambda, on demand, 2026-11-21, OLDER THAN A YEAR"
    old = {row.provider for row in old_prices(date(2026, 11, 22))}
    assert old == {"AWS capacity block"}
    assert len(old_prices(LATER)) > len(old_prices(date(2026, 11, 22)))
    lines = price_table(date(2026, 11, 22)).splitlines()
    assert [line.endswith("OLDER THAN A YEAR") for line in lines if "capacity block" in line] == [
        True
    ] * 3
    assert sum(line.endswith("OLDER THAN A YEAR") for line in lines) == 3
    report = tmp_path / "build" / "prices.json"
    assert catalog_main(["--strict", "--today", "2027-11-22", "--report", str(report)]) == 1
    rows = json.loads(report.read_text())
    assert {row["notebook"]: row["error"] for row in rows}[
        "T4"
    ] == "read 2026-11-21, over a year ago"
    old_cards = sum(is_old(row.as_of, LATER) for row in DEVICES.values())
    assert f"{old_cards} cards. Read them again" in capsys.readouterr().out


def test_every_card_s_power_has_a_source():
    powered = [row for row in DEVICES.values() if row.board_watts]
    assert {"A100-80GB", "A10", "H100"} <= {row.name for row in powered}
    assert all(row.power_source for row in powered), "a figure needs its source"
    assert all(day_of(row.as_of) for row in DEVICES.values())


def test_the_catalog_needs_no_torch():
    code = "import sys, utils.catalog; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
