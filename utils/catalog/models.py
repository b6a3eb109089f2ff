"""Published models: shapes and parameter counts, each with its source.

An exact count is the number of parameters that the checkpoint holds, without rotary buffers; a
rounded one carries the step of its last printed digit. Tests hold every row against
`ModelShape.parameter_count`.
"""

from __future__ import annotations

from utils.catalog.hub_models import hub_name, hub_names, hub_shape
from utils.catalog.lookup import not_found, plain
from utils.catalog.shapes import ModelShape
from utils.rules import of_kind

_KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, Table 3"
_NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473, Table 1; vocabulary 51,200 as stated there"


def _gpt2(name: str, layers: int, hidden: int, heads: int, count: int) -> ModelShape:
    return ModelShape(
        name=name, family="gpt", layers=layers, hidden=hidden, heads=heads,
        feedforward=4 * hidden, vocabulary=50_257, max_sequence=1024, positions="learned",
        tied=True, published_count=count,
        source="config.json and checkpoint of openai-community/gpt2 and its larger sizes",
    )  # fmt: skip


def _megatron(
    name: str, layers: int, hidden: int, heads: int, count: int, step: int, source: str
) -> ModelShape:
    return ModelShape(
        name=name, family="gpt", layers=layers, hidden=hidden, heads=heads,
        feedforward=4 * hidden, vocabulary=51_200, max_sequence=2048, positions="learned",
        tied=True, published_count=count, published_step=step, source=source,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, feedforward: int,
    vocabulary: int, max_sequence: int, count: int, source: str,
    tied: bool = False, qkv_bias: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        feedforward=feedforward, vocabulary=vocabulary, max_sequence=max_sequence, tied=tied,
        qkv_bias=qkv_bias, published_count=count,
        source=f"config.json and checkpoint of {source}",
    )  # fmt: skip


_GPT = [
    _gpt2("gpt2-124m", 12, 768, 12, 124_439_808),
    _gpt2("gpt2-355m", 24, 1024, 16, 354_823_168),
    _gpt2("gpt2-774m", 36, 1280, 20, 774_030_080),
    _gpt2("gpt2-1.5b", 48, 1600, 25, 1_557_611_200),
    # The 1.3B class of GPT-3: its paper's own row (24 heads of 128 on width 2048) does not give
    # 1.3B, so the open model of that size stands here.
    ModelShape(
        name="opt-1.3b", family="gpt", layers=24, hidden=2048, heads=32, feedforward=8192,
        vocabulary=50_272, max_sequence=2048, positions="learned", extra_positions=2, tied=True,
        published_count=1_315_758_080, source="config.json and checkpoint of facebook/opt-1.3b",
    ),
    ModelShape(
        name="gpt-neox-20b", family="gpt", layers=44, hidden=6144, heads=64, feedforward=24_576,
        vocabulary=50_432, max_sequence=2048, published_count=20_554_567_680,
        source="model card and config.json of EleutherAI/gpt-neox-20b",
    ),
    ModelShape(
        name="gpt-3-175b", family="gpt", layers=96, hidden=12_288, heads=96, feedforward=49_152,
        vocabulary=50_257, max_sequence=2048, positions="learned", tied=True,
        published_count=174_600_000_000, published_step=100_000_000,
        source="Brown et al. 2020, arXiv:2005.14165, Tables 2.1 and D.1",
    ),
    ModelShape(
        name="bloom-176b", family="gpt", layers=70, hidden=14_336, heads=112, feedforward=57_344,
        vocabulary=250_880, max_sequence=2048, positions="alibi", embedding_norm=True, tied=True,
        published_count=176_247_271_424, source="model card and checkpoint of bigscience/bloom",
    ),
]  # fmt: skip

_MEGATRON = [
    _megatron("megatron-1.7b", 24, 2304, 24, 1_700_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-3.6b", 30, 3072, 32, 3_600_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-7.5b", 36, 4096, 32, 7_500_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-18.4b", 40, 6144, 48, 18_400_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-22b", 48, 6144, 64, 22_000_000_000, 1_000_000_000, _KORTHIKANTI),
    _megatron("megatron-39.1b", 48, 8192, 64, 39_100_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-76.1b", 60, 10_240, 80, 76_100_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-145b", 80, 12_288, 96, 145_600_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-175b", 96, 12_288, 96, 174_600_000_000, 100_000_000,
              f"{_KORTHIKANTI}; count from Narayanan et al. 2021, Table 2"),
    _megatron("megatron-310b", 96, 16_384, 128, 310_100_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-530b", 105, 20_480, 128, 529_600_000_000, 100_000_000, _NARAYANAN),
    _megatron("megatron-1t", 128, 25_600, 160, 1_008_000_000_000, 100_000_000, _NARAYANAN),
]  # fmt: skip

_LLAMA = [
    _llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32_000, 2048, 1_100_048_384,
           "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
    _llama("llama-65b", 80, 8192, 64, 64, 22_016, 32_000, 2048, 65_285_660_672,
           "LLaMA-65B; shape in Touvron et al. 2023, arXiv:2302.13971, Table 2"),
    _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000, 4096, 6_738_415_616,
           "meta-llama/Llama-2-7b-hf"),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13_824, 32_000, 4096, 13_015_864_320,
           "meta-llama/Llama-2-13b-hf"),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28_672, 32_000, 4096, 68_976_648_192,
           "meta-llama/Llama-2-70b-hf"),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256, 8192, 8_030_261_248,
           "meta-llama/Meta-Llama-3-8B"),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28_672, 128_256, 8192, 70_553_706_496,
           "meta-llama/Meta-Llama-3-70B"),
    _llama("llama-3.1-405b", 126, 16_384, 128, 8, 53_248, 128_256, 131_072, 405_853_388_800,
           "meta-llama/Llama-3.1-405B (with 8 key-value heads)"),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128_256, 131_072, 1_235_814_400,
           "meta-llama/Llama-3.2-1B", tied=True),
    _llama("mistral-7b", 32, 4096, 32, 8, 14_336, 32_000, 8192, 7_241_732_096,
           "mistralai/Mistral-7B-v0.1"),
    _llama("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064, 32_768, 7_615_616_512,
           "Qwen/Qwen2.5-7B", qkv_bias=True),
]  # fmt: skip

_EXPERTS = [
    ModelShape(
        name="mixtral-8x7b", family="llama", layers=32, hidden=4096, heads=32, kv_heads=8,
        feedforward=14_336, vocabulary=32_000, max_sequence=32_768, num_experts=8,
        experts_per_token=2, published_count=46_702_792_704,
        source="config.json and checkpoint of mistralai/Mixtral-8x7B-v0.1",
    ),
    ModelShape(
        name="mixtral-8x22b", family="llama", layers=56, hidden=6144, heads=48, kv_heads=8,
        feedforward=16_384, vocabulary=32_000, max_sequence=65_536, num_experts=8,
        experts_per_token=2, published_count=140_620_634_112, published_step=1,
        source="config.json and checkpoint of mistralai/Mixtral-8x22B-v0.1",
    ),
    ModelShape(
        name="qwen3-30b-a3b", family="llama", layers=48, hidden=2048, heads=32, kv_heads=4,
        head_width=128, feedforward=6144, vocabulary=151_936, max_sequence=40_960, qk_norm=True,
        num_experts=128, experts_per_token=8, expert_feedforward=768,
        published_count=30_532_122_624, source="config.json and checkpoint of Qwen/Qwen3-30B-A3B",
    ),
    ModelShape(
        name="qwen3-235b-a22b", family="llama", layers=94, hidden=4096, heads=64, kv_heads=4,
        head_width=128, feedforward=12_288, vocabulary=151_936, max_sequence=40_960, qk_norm=True,
        num_experts=128, experts_per_token=8, expert_feedforward=1536,
        published_count=235_093_634_560,
        source="config.json and checkpoint of Qwen/Qwen3-235B-A22B",
    ),
]  # fmt: skip

MODELS: dict[str, ModelShape] = {
    shape.name: shape for shape in _GPT + _MEGATRON + _LLAMA + _EXPERTS
}

# Exact counts at 1,000 classes; source: `num_params` of torchvision's pretrained weights.
RESNET_PARAMETER_COUNTS: dict[int, int] = {
    18: 11_689_512,
    34: 21_797_672,
    50: 25_557_032,
    101: 44_549_160,
    152: 60_192_808,
}


def model_shape(name: str | ModelShape) -> ModelShape:
    """The published model called `name`, in any case and spacing: `model_shape("Llama 2 7B")`.

    Names of the Hub are found, too, where their configuration ships with the course:
    `model_shape("Qwen/Qwen3-8B")`. A shape is given back as it is, so that whatever takes a shape
    takes a name as well.

    Raises:
        ValueError: no such model, or one of another architecture; the sentence gives the nearest
            names.
    """
    of_kind("model_shape", model=(name, ModelShape, str))
    if isinstance(name, ModelShape):
        return name
    rows = {plain(key): shape for key, shape in MODELS.items()}
    for wanted in (plain(name), plain(name.rpartition("/")[2])):
        if wanted in rows:
            return rows[wanted]
    if (shape := hub_shape(name)) is not None:
        return shape
    if (full := hub_name(name)) is not None:
        raise ValueError(
            f"{full} is no decoder of Llama's or GPT's kind, and the planner has no formula for it. "
            f"It can be simulated: fit_model({full!r}, card)."
        )
    raise ValueError(not_found([*MODELS, *hub_names()], name, "model"))
