"""Serving a model: bytes of weights and cache, and how fast tokens can come at most.

Each new token reads every weight once, and the keys and values of all tokens before it. At small batches
that takes longer than the arithmetic, so bytes over bandwidth bound the rate (Pope et al. 2022,
arXiv:2211.05102, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import Device, ModelShape, device, model_shape
from utils.catalog.rules import positive, whole

PLAIN_BYTES = 2  # of embedding, norms, and a scale of a group: 16 bits


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A model as it is kept for inference.

    Attributes:
        model: a shape, or its name in the catalog.
        bits: of a weight in a linear layer; 16 for plain weights.
        group: weights that share a scale of 16 bits and a zero point of as many; None for no scales.
        cache_bytes: of one number in the cache of keys and values.
    """

    model: ModelShape | str
    bits: float = 16
    group: int | None = None
    cache_bytes: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that cannot be, or a model that is not in the catalog."""
        model_shape(self.model)
        positive("serving", bits=self.bits, cache_bytes=self.cache_bytes)
        if self.group is not None:
            whole("serving", group=self.group)

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return model_shape(self.model)

    @property
    def weight_bytes(self) -> float:
        """All weights: linear layers in `bits`, embedding and norms in 16."""
        counts = self.shape.parameter_counts()
        plain = counts["embedding"] + counts["norms"]
        return self.linear_bytes + PLAIN_BYTES * plain

    @property
    def linear_bytes(self) -> float:
        """The linear layers, scales and zero points with them: what each token reads."""
        counts = self.shape.parameter_counts()
        head = counts["head"] or counts["embedding"]  # a tied head is read as well
        numbers = counts["attention"] + counts["mlp"] + head
        scales = 0.0 if self.group is None else 2 * PLAIN_BYTES / self.group
        return numbers * (self.bits / 8 + scales)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers: 2 x layers x key-value heads x width."""
        shape = self.shape
        return 2 * shape.layers * shape.key_value_heads * shape.head_dim * self.cache_bytes

    def memory_bytes(self, batch: int, context_tokens: int) -> float:
        """Weights and the cache of `batch` sequences of `context_tokens` each."""
        return self.weight_bytes + batch * context_tokens * self.cache_bytes_per_token

    def largest_context(self, memory_bytes: float, batch: int = 1) -> int:
        """The longest context that fits beside the weights, in tokens; 0 where they do not fit."""
        room = memory_bytes - self.weight_bytes
        return max(0, int(room // (batch * self.cache_bytes_per_token)))

    def tokens_per_second(
        self, gpu: Device | str, batch: int = 1, context_tokens: int = 0, gpus: int = 1
    ) -> float:
        """The most new tokens per second, all sequences together, with weights over `gpus`.

        The peak bandwidth of the memory over what a step reads; no kernel reaches it.

        Raises:
            ValueError: an unknown device, or no sequence or GPU.
        """
        whole("serving", batch=batch, gpus=gpus)
        read = self.linear_bytes + batch * context_tokens * self.cache_bytes_per_token
        row = device(gpu) if isinstance(gpu, str) else gpu
        return batch * gpus * row.memory_bytes_per_second / read
