"""The shape of a transformer, and its parameters counted part by part from the shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from utils.rules import keep_whole, one_of
from utils.units import format_count

FAMILIES = {
    "gpt": "GELU feed-forward, LayerNorm, a bias on every projection",
    "llama": "SwiGLU feed-forward, RMSNorm, no biases",
}
POSITIONS = ("learned", "rotary", "alibi")
SIZES = ("layers", "hidden", "heads", "feedforward", "vocabulary", "max_sequence")
EXPERT_FIELDS = ("experts_per_token", "expert_feedforward")


def check_experts(shape: ModelShape) -> None:
    """Refuse mixtures of experts that no model can be. Raises ValueError with what to change."""
    name, experts, chosen = shape.name, shape.num_experts, shape.experts_per_token
    keep_whole(shape, name, "shared_feedforward", "dense_layers", least=0)
    if experts is None:
        given = [field for field in EXPERT_FIELDS if getattr(shape, field) is not None]
        given += [
            field for field in ("shared_feedforward", "dense_layers") if getattr(shape, field)
        ]
        if given:
            raise ValueError(
                f"{name}: {given[0]} needs experts. Write num_experts=8, or leave it out."
            )
        return
    keep_whole(shape, name, "num_experts")
    if chosen is None:
        raise ValueError(
            f"{name}: {experts} experts, and experts_per_token is not given. Write how many each "
            "token passes through, such as experts_per_token=2."
        )
    keep_whole(shape, name, "experts_per_token", optional="expert_feedforward")
    if chosen > experts:
        raise ValueError(
            f"{name}: experts_per_token is {chosen}, more than the {experts} experts there are. "
            f"Largest: {experts}."
        )
    if shape.dense_layers >= shape.layers:
        raise ValueError(
            f"{name}: dense_layers is {shape.dense_layers} of {shape.layers} layers, so none has "
            f"experts. Largest: {shape.layers - 1}."
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer, described as far as its parameters go.

    Attributes:
        name: What `model_shape` finds it by.
        family: "gpt" or "llama", see `FAMILIES`.
        layers: Transformer blocks, L.
        hidden: Width of the residual stream, h.
        heads: Query heads, a; each is `head_dim` wide.
        feedforward: Inner width of the feed-forward layer, 4h for most of the "gpt" family.
        vocabulary: Rows of the embedding, with the checkpoint's padding, V.
        max_sequence: Longest sequence of its training, s, in tokens.
        kv_heads: Key and value heads; None for as many as `heads`.
        head_width: Width of one head, where it is not `hidden // heads`.
        positions: "learned" (a table of parameters), "rotary" or "alibi" (no parameters).
        extra_positions: Rows of the position table beyond `max_sequence` (OPT has 2).
        tied: The head is the embedding's own matrix and has no parameters.
        qkv_bias: Biases on the query, key and value projections alone (Qwen 2).
        qk_norm: An RMSNorm of each head's queries and keys, one weight a channel (Qwen 3).
        embedding_norm: One more LayerNorm, on the embedding (BLOOM).
        parallel_residual: Attention and feed-forward read the same stream, and are added to it
            together (GPT-NeoX, phi, Falcon).
        num_experts: Experts of a mixture-of-experts block, E; None for a dense model. Experts have
            no biases, and a router of E rows chooses among them.
        experts_per_token: Experts that each token passes through, k.
        expert_feedforward: Inner width of one expert; None for `feedforward`.
        shared_feedforward: Inner width of the experts that all tokens share, together; 0: none.
        dense_layers: Blocks at the start that have no experts (DeepSeek has 3).
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
    head_width: int | None = None
    positions: str = "rotary"
    extra_positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    parallel_residual: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_feedforward: int | None = None
    shared_feedforward: int = 0
    dense_layers: int = 0
    published_count: int | None = None
    published_step: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have. Raises ValueError with what to change."""
        one_of(f"{self.name}: family", self.family, tuple(FAMILIES))
        one_of(f"{self.name}: positions", self.positions, POSITIONS)
        keep_whole(self, self.name, *SIZES, optional="kv_heads")
        keep_whole(self, self.name, "extra_positions", least=0)
        keep_whole(self, self.name, optional="head_width")
        if self.head_width is None and self.hidden % self.heads:
            raise ValueError(f"{self.name}: {self.heads} heads do not divide {self.hidden} evenly.")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.name}: {self.key_value_heads} key-value heads cannot be shared evenly "
                f"by {self.heads} heads."
            )
        check_experts(self)

    def __hash__(self) -> int:
        """By name and size: a search asks for the same shape thousands of times."""
        return hash((self.name, self.layers, self.hidden))

    @property
    def expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.feedforward if self.expert_feedforward is None else self.expert_feedforward

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def attention_width(self) -> int:
        """Width of all query heads together: `hidden` in most models."""
        return self.heads * self.head_dim

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, `heads` where none were given."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a weight per channel, and a bias with LayerNorm."""
        return self.hidden * (2 if self.family == "gpt" else 1)

    def expert_parameter_counts(self) -> dict[str, int]:
        """Feed-forward parameters of one block with experts: "experts", "router", "shared"."""
        matrices = 2 if self.family == "gpt" else 3
        one, shared = (
            matrices * self.hidden * w for w in (self.expert_width, self.shared_feedforward)
        )
        experts = self.num_experts or 0
        return {"experts": experts * one, "router": experts * self.hidden, "shared": shared}

    def layer_parameter_counts(self) -> dict[str, int]:
        """Parameters of one block without experts: "attention", "mlp" and "norms"."""
        h, f, kv = self.hidden, self.feedforward, self.key_value_heads * self.head_dim
        biases = self.family == "gpt"
        q = self.attention_width
        attention = 2 * h * q + 2 * h * kv + (q + 2 * kv) * (biases or self.qkv_bias) + h * biases
        mlp = 2 * h * f + f + h if biases else 3 * h * f
        norms = 2 * self.norm_parameters + 2 * self.head_dim * self.qk_norm
        return {"attention": attention, "mlp": mlp, "norms": norms}

    def parameter_counts(self) -> dict[str, int]:
        """All parameters: "embedding" (with positions), "attention", "mlp", "norms", "head".

        A mixture of experts also has "experts", "router" and "shared".
        """
        rows = self.vocabulary
        if self.positions == "learned":
            rows += self.max_sequence + self.extra_positions
        counts = {"embedding": rows * self.hidden}
        for part, count in self.layer_parameter_counts().items():
            counts[part] = self.layers * count
        if self.num_experts:
            counts["mlp"] = self.dense_layers * self.layer_parameter_counts()["mlp"]
            for part, count in self.expert_parameter_counts().items():
                counts[part] = self.expert_layers * count
        counts["norms"] += (1 + self.embedding_norm) * self.norm_parameters  # the last one
        counts["head"] = 0 if self.tied else self.vocabulary * self.hidden
        return counts

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(self.parameter_counts().values())

    @property
    def active_parameter_count(self) -> int:
        """Parameters that one token passes through: k of E experts, everything else."""
        if not self.num_experts:
            return self.parameter_count
        idle = self.num_experts - (self.experts_per_token or 0)
        experts = self.parameter_counts()["experts"]
        return self.parameter_count - experts * idle // self.num_experts

    def __str__(self) -> str:
        return f"{self.name} ({format_count(self.parameter_count)} parameters)"
