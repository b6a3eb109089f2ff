"""The shape of a transformer, and its parameters counted part by part from the shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.rules import keep_whole, one_of
from utils.units import format_count

FAMILIES = {
    "gpt": "GELU feed-forward, LayerNorm, a bias on every projection",
    "llama": "SwiGLU feed-forward, RMSNorm, no biases",
}
POSITIONS = ("learned", "rotary", "alibi")
SIZES = ("layers", "hidden", "heads", "feedforward", "vocabulary", "max_sequence")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer, described as far as its parameters go.

    Attributes:
        name: What `model_shape` finds it by.
        family: "gpt" or "llama", see `FAMILIES`.
        layers: Transformer blocks, L.
        hidden: Width of the residual stream, h.
        heads: Query heads, a; each is `hidden // heads` wide.
        feedforward: Inner width of the feed-forward layer, 4h for most of the "gpt" family.
        vocabulary: Rows of the embedding, with the checkpoint's padding, V.
        max_sequence: Longest sequence of its training, s, in tokens.
        kv_heads: Key and value heads; None for as many as `heads`.
        positions: "learned" (a table of parameters), "rotary" or "alibi" (no parameters).
        extra_positions: Rows of the position table beyond `max_sequence` (OPT has 2).
        tied: The head is the embedding's own matrix and has no parameters.
        qkv_bias: Biases on the query, key and value projections alone (Qwen).
        embedding_norm: One more LayerNorm, on the embedding (BLOOM).
        published_count: The parameters that the authors or the checkpoint state.
        published_step: The last printed digit of `published_count`; 1 where it is exact.
        source: Where shape and count were read.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    feedforward: int
    vocabulary: int
    max_sequence: int
    kv_heads: int | None = None
    positions: str = "rotary"
    extra_positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    embedding_norm: bool = False
    published_count: int | None = None
    published_step: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have. Raises ValueError with what to change."""
        one_of(f"{self.name}: family", self.family, tuple(FAMILIES))
        one_of(f"{self.name}: positions", self.positions, POSITIONS)
        keep_whole(self, self.name, *SIZES, optional="kv_heads")
        keep_whole(self, self.name, "extra_positions", least=0)
        if self.hidden % self.heads:
            raise ValueError(f"{self.name}: {self.heads} heads do not divide {self.hidden} evenly.")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.name}: {self.key_value_heads} key-value heads cannot be shared evenly "
                f"by {self.heads} heads."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, `heads` where none were given."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a weight per channel, and a bias with LayerNorm."""
        return self.hidden * (2 if self.family == "gpt" else 1)

    def layer_parameter_counts(self) -> dict[str, int]:
        """Parameters of one block: "attention", "mlp" and "norms"."""
        h, f, kv = self.hidden, self.feedforward, self.key_value_heads * self.head_dim
        biases = self.family == "gpt"
        attention = 2 * h * h + 2 * h * kv + (h + 2 * kv) * (biases or self.qkv_bias) + h * biases
        mlp = 2 * h * f + f + h if biases else 3 * h * f
        return {"attention": attention, "mlp": mlp, "norms": 2 * self.norm_parameters}

    def parameter_counts(self) -> dict[str, int]:
        """All parameters: "embedding" (with positions), "attention", "mlp", "norms", "head"."""
        rows = self.vocabulary
        if self.positions == "learned":
            rows += self.max_sequence + self.extra_positions
        counts = {"embedding": rows * self.hidden}
        for part, count in self.layer_parameter_counts().items():
            counts[part] = self.layers * count
        counts["norms"] += (1 + self.embedding_norm) * self.norm_parameters  # the last one
        counts["head"] = 0 if self.tied else self.vocabulary * self.hidden
        return counts

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(self.parameter_counts().values())

    def __str__(self) -> str:
        return f"{self.name} ({format_count(self.parameter_count)} parameters)"
