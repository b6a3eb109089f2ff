"""The sizes of a Llama-style transformer, and the bridge from a published shape to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.rules import keep_whole

if TYPE_CHECKING:
    from utils.catalog import ModelShape


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a `Transformer` is built from.

    Attributes:
        vocabulary: Number of tokens; 256 for bytes.
        hidden: Width of the residual stream, H.
        layers: Number of blocks.
        heads: Query heads, A. Each is H / A wide.
        kv_heads: Key and value heads, K; None for as many as `heads`.
        feedforward: Inner width of the SwiGLU layer.
        tied: Embedding and head share one matrix.
        qkv_bias: Biases on the query, key and value projections (Qwen has them, Llama not).
        rotary_base: Base of the rotary wavelengths: 10,000 in Llama 2, 500,000 in Llama 3.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocabulary: int = 256
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int | None = None
    feedforward: int = 704
    tied: bool = False
    qkv_bias: bool = False
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together. Raises ValueError."""
        sizes = ("vocabulary", "hidden", "layers", "heads", "feedforward")
        keep_whole(self, "model", *sizes, optional="kv_heads")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden {self.hidden} over {self.heads} heads is no even width; rotary positions "
                f"turn pairs of channels, so make hidden a multiple of {2 * self.heads}."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly; "
                "kv_heads must divide heads."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.hidden // self.heads

    @classmethod
    def from_shape(cls, shape: ModelShape, **changes: Any) -> TransformerConfig:
        """The configuration of a published model of the Llama family, with `changes`.

        Raises:
            ValueError: the shape is of another family, or a name in place of a shape.
        """
        if isinstance(shape, str):  # an exported script has no catalog to find it in
            raise ValueError(f"from_shape takes a shape; write model_shape({shape!r}).")
        if shape.family != "llama" or shape.positions != "rotary":
            raise ValueError(
                f"{shape.name} is no Llama-style model (family {shape.family!r}, positions "
                f"{shape.positions!r}); choose one such as 'llama-2-7b'."
            )
        if shape.num_experts is not None:
            raise ValueError(
                f"{shape.name} has {shape.num_experts} experts in a layer, and this transformer has "
                "none: choose a dense shape, such as 'llama-2-7b'."
            )
        sizes = {
            "vocabulary": shape.vocabulary,
            "hidden": shape.hidden,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "feedforward": shape.feedforward,
            "tied": shape.tied,
            "qkv_bias": shape.qkv_bias,
        }
        return cls(**{**sizes, **changes})
