"""The catalog's figures agree with what was published, and its look-ups help."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from datetime import date

import pytest

from utils.catalog import (
    DEVICES,
    LINKS,
    device,
    link,
    old_prices,
    price,
    price_table,
    read_prices,
)
from utils.catalog.__main__ import main as catalog_main
from utils.catalog.age import age_days, day_of, is_old
from utils.catalog.prices import COLUMNS
from utils.units import GB, GIB, MIB


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
