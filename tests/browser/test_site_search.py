"""What people type into the site's search, and the lesson that they look for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
pytest.importorskip("myst_nb")

from .site_pages import Reader, build_site, find_browser, reader, served, told

pytestmark = pytest.mark.slow
FIRST = 3
FOUND = "#search-results > ul > li > a"
# By lesson. Each is found among the first three.
TYPED = {
    "01": (
        "optimizer states memory",
        "peak memory",
        "activations",
        "batch size memory",
    ),
    "02": ("mixed precision", "autocast"),
    "03": ("GradScaler", "loss scaling", "bf16 vs fp16", "nan loss"),
    "04": ("DDP", "DistributedSampler", "SyncBatchNorm"),
    "05": ("gradient checkpointing", "activation checkpointing", "selective checkpointing"),
    "05a": ("simulate",),
    "06": ("QLoRA", "LoRA", "fine-tune 7B 24 GB", "bitsandbytes", "llama 7B"),
    "07": ("CPU offload", "ZeRO-Offload", "DeepSpeed offload", "pinned memory"),
    "08": ("GPTQ", "AWQ", "quantization inference", "KV cache"),
    "09": ("ZeRO", "FSDP", "fully_shard"),
    "10": (
        "out of memory",
        "CUDA out of memory",
        "memory leak",
        "fragmentation",
        "expandable_segments",
    ),
    "11": ("all-reduce", "NCCL", "bandwidth", "InfiniBand", "stragglers"),
    "12": ("tensor parallel", "sequence parallel"),
    "13": ("pipeline parallel", "1F1B", "bubble"),
    "14": ("HSDP", "place ranks"),
    "15": ("175B 64 A100", "MFU"),
    "16": ("save checkpoint resume",),
    "16a": ("NCCL timeout",),
    "17": ("torchrun restart", "slurm"),
    "17a": ("cost per token", "spot"),
    "18": ("ring attention", "context parallel"),
    "19": ("mixture of experts", "expert parallelism"),
    "20": ("fp8", "mxfp8"),
}


def results(one: Reader, typed: str) -> list[str]:
    """The titles that the search shows, best first."""
    one.open(f"search.html?q={typed.replace(' ', '+')}")
    one.page.wait_for_selector(FOUND)
    one.page.wait_for_function("() => /found|matching/.test(document.body.innerText)")
    return one.page.locator(FOUND).all_inner_texts()


def test_what_people_type_leads_to_its_lesson(tmp_path: Path) -> None:
    browser = find_browser() or pytest.skip("no Chromium (on Debian: apt install chromium)")
    site, missed = build_site(tmp_path), {}
    with served(site) as address, reader(browser, address) as one:
        for lesson, questions in TYPED.items():
            for typed in questions:
                shown = results(one, typed)[:FIRST]
                if not any(title.startswith(f"{lesson} ") for title in shown):
                    missed[typed] = shown
    assert sum(map(len, TYPED.values())) >= 50
    assert missed == {}, f"these do not lead to their lesson: {missed}"
    assert one.findings == [], told(one.findings)
