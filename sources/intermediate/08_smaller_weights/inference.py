"""Serving a model: bytes of weights and cache, and how fast tokens can come at most.

Each new token reads every weight once, and the keys and values of all tokens before it. At small batches
that takes longer than the arithmetic, so bytes over bandwidth bound the rate (Pope et al. 2022,
arXiv:2211.05102, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.catalog import Device, ModelShape, device, model_shape
from utils.rules import positive, whole

PLAIN_BYTES = 2  # of a weight in the embedding and the norms, and of a group's scale or zero point


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A model as it is kept for inference.

    Attributes:
        model: a shape, or its name in the catalog.
        bits: of a weight in a linear layer; 16 for plain weights.
        head_bits: of a weight in the head; None for `bits`. Most libraries leave it in 16.
        group: weights that share a scale and a zero point of 16 bits each, as PyTorch's int4
            kernel keeps them; None for one scale a row, which is not counted.
        cache_bytes: of one number in the cache of keys and values.
    """

    model: ModelShape | str
    bits: float = 16
    head_bits: float | None = None
    group: int | None = None
    cache_bytes: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that cannot be, experts, or a model that is not in the catalog."""
        if self.shape.num_experts:
            raise ValueError(
                f"{self.shape.name} has experts, and a token reads only some of their weights. "
                "Serving counts dense models, such as 'llama-2-70b'."
            )
        positive("serving", bits=self.bits, cache_bytes=self.cache_bytes)
        if self.group is not None:
            whole("serving", group=self.group)
        if self.head_bits is not None:
            positive("serving", head_bits=self.head_bits)

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return model_shape(self.model)

    @property
    def weight_bytes(self) -> float:
        """All weights: linear layers in `bits`, embedding and norms in 16."""
        counts = self.shape.parameter_counts()
        return self.linear_bytes + PLAIN_BYTES * (counts["embedding"] + counts["norms"])

    @property
    def linear_bytes(self) -> float:
        """The linear layers, scales and zero points with them: what each token reads."""
        counts = self.shape.parameter_counts()
        return (counts["attention"] + counts["mlp"]) * self._number_bytes + self.head_bytes

    @property
    def head_bytes(self) -> float:
        """The head's part of `linear_bytes`; a tied head is read as well."""
        each = self._number_bytes if self.head_bits is None else self.head_bits / 8
        return self._head_numbers * each

    @property
    def linear_numbers(self) -> int:
        """The weights that each token is multiplied by."""
        counts = self.shape.parameter_counts()
        return counts["attention"] + counts["mlp"] + self._head_numbers

    @property
    def _head_numbers(self) -> int:
        counts = self.shape.parameter_counts()
        return counts["head"] or counts["embedding"]

    @property
    def _number_bytes(self) -> float:
        return self.bits / 8 + (0.0 if self.group is None else 2 * PLAIN_BYTES / self.group)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers: 2 x layers x key-value heads x width."""
        shape = self.shape
        return 2 * shape.layers * shape.key_value_heads * shape.head_dim * self.cache_bytes

    def memory_bytes(self, batch: int, context_tokens: int) -> float:
        """Weights and the cache of `batch` sequences of `context_tokens` each."""
        return self.weight_bytes + batch * context_tokens * self.cache_bytes_per_token

    def cache_tokens(self, memory_bytes: float) -> int:
        """How many tokens' caches fit beside the weights, all sequences together; 0 for none."""
        return max(0, int((memory_bytes - self.weight_bytes) // self.cache_bytes_per_token))

    def tokens_per_second(
        self, gpu: Device | str, batch: int = 1, context_tokens: int = 0, gpus: int = 1
    ) -> float:
        """The most new tokens per second, all sequences together, with weights over `gpus`.

        The peak bandwidth of the memory over what a step reads; no kernel reaches it. Holds while
        reading takes longer than the arithmetic (`arithmetic_batch`).

        Raises:
            ValueError: an unknown device, or no sequence or GPU.
        """
        whole("serving", batch=batch, gpus=gpus)
        read = self.linear_bytes + batch * context_tokens * self.cache_bytes_per_token
        row = device(gpu) if isinstance(gpu, str) else gpu
        return batch * gpus * row.memory_bytes_per_second / read

    def arithmetic_batch(self, gpu: Device | str) -> float:
        """From this batch on, products in bf16 take longer than reading the weights once."""
        row = device(gpu) if isinstance(gpu, str) else gpu
        reading = self.linear_bytes / row.memory_bytes_per_second
        return reading * row.peak_flops_per_second("bf16") / (2 * self.linear_numbers)


def crossing_tokens(one: Serving, other: Serving) -> float:
    """Cached tokens, of all sequences together, at which two formats of a model take as many bytes.

    From there on the format with the smaller cache keeps less, and reads less for a step.

    Raises:
        ValueError: two models, or one format takes fewer bytes at any number of tokens.
    """
    if one.shape != other.shape:
        raise ValueError(
            f"{one.shape.name} and {other.shape.name} are two models; compare formats of one."
        )
    weights = one.weight_bytes - other.weight_bytes
    cache = other.cache_bytes_per_token - one.cache_bytes_per_token
    if weights * cache <= 0:
        raise ValueError(
            "Two formats cross where one saves on the weights and the other on the cache; "
            "here one takes fewer bytes at any number of tokens."
        )
    return weights / cache


def paged_tokens(lengths: Sequence[int], block: int = 16) -> int:
    """Cache that a paged cache gives out to sequences of these lengths: whole blocks, in tokens.

    Kwon et al. 2023, arXiv:2309.06180, section 4.

    Raises:
        ValueError: the block is not a whole positive number.
    """
    whole("paged cache", block=block)
    return sum(-(-length // block) * block for length in lengths)
