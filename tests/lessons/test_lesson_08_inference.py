"""Bytes of serving a model, against counts by hand, published rates and a real cache."""

from __future__ import annotations

import pytest

from evidence.validation.tables import table
from utils.catalog import device
from utils.lessons.lesson_08.inference import Serving, crossing_tokens, paged_tokens


def test_the_cache_of_a_token_by_hand() -> None:
    assert Serving(model="llama-2-7b").cache_bytes_per_token == 2 * 32 * 32 * 128 * 2, "every head"
    grouped = Serving(model="llama-2-70b")
    assert grouped.cache_bytes_per_token == 2 * 80 * 8 * 128 * 2, "8 key-value heads for 64"


def test_the_weights_by_hand() -> None:
    plain = Serving(model="llama-2-7b")
    assert plain.weight_bytes == 2 * plain.shape.parameter_count, "16 bits for each parameter"
    few = Serving(model="llama-2-7b", bits=4, group=128)
    embedding = 32_000 * 4096
    norms = (2 * 32 + 1) * 4096
    linear = few.shape.parameter_count - embedding - norms
    assert few.linear_bytes == linear * (4 / 8 + 4 / 128), (
        "codes, a scale and a zero point of 16 bits"
    )
    assert few.weight_bytes == few.linear_bytes + 2 * (embedding + norms), "the rest in 16 bits"


def test_a_head_may_stay_in_sixteen_bits() -> None:
    few = Serving(model="llama-2-7b", bits=4, head_bits=16)
    head = 32_000 * 4096
    assert few.head_bytes == 2 * head, "as libraries leave it"
    assert few.linear_bytes == 2 * head + (few.linear_numbers - head) / 2, "the rest in 4 bits"


def test_a_tied_head_is_read_as_well() -> None:
    tied = Serving(model="gpt2-124m")
    counts = tied.shape.parameter_counts()
    assert counts["head"] == 0, "the head is the embedding's matrix"
    assert tied.linear_bytes == 2 * (counts["attention"] + counts["mlp"] + counts["embedding"]), (
        "read once a token"
    )


def test_the_memory_is_a_line_in_tokens() -> None:
    served = Serving(model="llama-2-7b", bits=4, group=128)
    room = served.memory_bytes(8, 1000)
    assert served.cache_tokens(room) == 8000, "to the last byte"
    assert served.cache_tokens(room - 1) == 7999, "a byte less, a token less"
    assert served.cache_tokens(served.weight_bytes - 1) == 0, (
        "weights that do not fit leave no room"
    )


def test_formats_cross_where_they_take_as_many_bytes() -> None:
    cache, weights = Serving(model="llama-2-7b", cache_bytes=1), Serving(model="llama-2-7b", bits=8)
    tokens = crossing_tokens(cache, weights)
    linear = cache.linear_numbers
    assert tokens == linear / (512 * 1024 - 256 * 1024), "a byte of each weight, over half a cache"
    kept, read = (cache.memory_bytes(1, int(tokens)), weights.memory_bytes(1, int(tokens)))
    assert kept == pytest.approx(read, rel=1e-6), "as many bytes of memory"
    rates = [each.tokens_per_second("A100-80GB", 8, int(tokens / 8)) for each in (cache, weights)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-4), "and as fast, at any batch"
    assert crossing_tokens(weights, cache) == tokens, "the order does not matter"


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (Serving(model="llama-2-7b"), Serving(model="llama-2-70b"), "two models"),
        (Serving(model="llama-2-7b", bits=8, cache_bytes=1), Serving(model="llama-2-7b"), "any"),
        (Serving(model="llama-2-7b"), Serving(model="llama-2-7b", bits=8), "any number of tokens"),
    ],
)
def test_formats_that_never_cross_say_so(one: Serving, other: Serving, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        crossing_tokens(one, other)


def test_gpt_fast_moved_the_bytes_that_we_count() -> None:
    """Its bandwidth over its rate: what it says it reads for a token, per GPU."""
    names = {
        "Llama-2-7B": "llama-2-7b",
        "Llama-2-70B": "llama-2-70b",
        "Llama-3.1-8B": "llama-3-8b",
        "Llama-3.1-70B": "llama-3-70b",
    }
    for row in table("gpt_fast_decode"):
        served = Serving(
            model=names[row["model"]], bits=int(row["bits"]), group=int(row["group"] or 0) or None
        )
        theirs = 1e9 * float(row["bandwidth_gb_per_second"]) / float(row["tokens_per_second"])
        gpus = int(row["gpus"])
        ours = (served.linear_bytes - served.head_bytes) / gpus + served.head_bytes  # not split
        embedding = 2 * served.shape.parameter_counts()["embedding"]  # in some rows of Llama-2
        more = embedding if row["model"].startswith("Llama-2") else 0
        assert -0.003 * theirs <= theirs - ours <= more + 0.003 * theirs, (
            f"{row}: ours {ours:.4g}, theirs {theirs:.4g}"
        )
        bound = served.tokens_per_second("A100-80GB", gpus=gpus)
        assert float(row["tokens_per_second"]) < bound, f"{row}: nothing is faster than its bytes"


def test_a_batch_reads_the_weights_once() -> None:
    served = Serving(model="llama-2-7b")
    one, eight = (served.tokens_per_second("A100-80GB", batch) for batch in (1, 8))
    assert eight == pytest.approx(8 * one), "without a context nothing else is read"
    long = served.tokens_per_second("A100-80GB", 1000, 10_000)
    assert long == pytest.approx(
        device("A100-80GB").memory_bytes_per_second / (10_000 * served.cache_bytes_per_token),
        rel=0.01,
    ), "at last the cache alone is read"


def test_arithmetic_takes_over_where_the_roofline_bends() -> None:
    card = device("A100-80GB")
    served = Serving(model="llama-2-7b")
    ridge = card.peak_flops_per_second("bf16") / card.memory_bytes_per_second
    assert served.arithmetic_batch("A100-80GB") == pytest.approx(ridge), (
        "two operations for two bytes"
    )
    assert Serving(model="llama-2-7b", bits=8).arithmetic_batch(card) == pytest.approx(ridge / 2), (
        "for one"
    )


def test_pages_are_whole_blocks() -> None:
    assert paged_tokens([1, 16, 17]) == 16 + 16 + 32, "each sequence's last block is its own"
    assert paged_tokens([5, 7], block=1) == 12, "blocks of one token lose nothing"
    assert paged_tokens([]) == 0, "nobody waits"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Serving(model="llama-2-7c"), "llama-2-7b"),
        (lambda: Serving(model="llama-2-7b", bits=0), "bits is 0"),
        (lambda: Serving(model="llama-2-7b", group=0), "group is 0"),
        (lambda: Serving(model="llama-2-7b", head_bits=0), "head_bits is 0"),
        (lambda: Serving(model="mixtral-8x7b"), "has experts"),
        (lambda: Serving(model="llama-2-7b").tokens_per_second("A100-80GB", 0), "batch is 0"),
        (lambda: Serving(model="llama-2-7b").tokens_per_second("A1000"), "A100"),
        (lambda: paged_tokens([1], block=0), "block is 0"),
    ],
)
def test_bad_input_ends_in_a_sentence(call, says) -> None:
    with pytest.raises(ValueError, match=says):
        call()
