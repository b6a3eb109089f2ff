"""Low-rank adapters on a frozen base: what trains, what is stored, in how many bits."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.rules import keep_whole, one_of

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
BASES = ("bf16", "nf4", "nf4-dq", "int8")

# Bytes per quantized parameter (Dettmers et al. 2023, arXiv:2305.14314, section 3): NF4 is half a
# byte and one float32 scale per block of 64; double quantization stores the scales in 8 bits, with
# one float32 per 256 of them. LLM.int8 keeps one float32 scale per row, too few to count.
BASE_BYTES = {"bf16": 2.0, "nf4": 0.5 + 4 / 64, "nf4-dq": 0.5 + 1 / 64 + 4 / 64 / 256, "int8": 1.0}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA (Hu et al. 2021, arXiv:2106.09685), or QLoRA with a quantized base.

    Attributes:
        rank: r: each adapted matrix of shape (in, out) gets r * (in + out) parameters.
        targets: Adapted matrices, of "q", "k", "v", "o", "gate", "up", "down".
        base: How the frozen matrices are stored: "bf16", "nf4", "nf4-dq" (double quantization),
            "int8". Embeddings and norms stay in 16 bits.
        quantized_head: The head is quantized like the blocks (litgpt does, transformers does not).
        adapter_bytes: Of one adapter parameter: 4 in PEFT, 2 where all is bfloat16.
        autocast: Products of adapters in float32 run in 16 bits, as under Trainer(bf16=True); their
            input is cast to float32 first, for the dropout (peft, lora/layer.py).
        adapter_dropout: Adapters see their input through a dropout of their own.
        keeps_inputs: Quantized matrices keep their inputs although they are frozen, as bitsandbytes
            did in 2023 (0.41, autograd/_functions.py: ctx.tensors = (A, B)).
        fused: q, k and v are one matrix whose adapters share their input (litgpt), see
            `saved_tensors._fused_adapters`; else each adapter keeps its own.
    """

    rank: int = 8
    targets: tuple[str, ...] = ("q", "v")
    base: str = "bf16"
    quantized_head: bool = False
    adapter_bytes: int = 4
    autocast: bool = False
    adapter_dropout: bool = False
    keeps_inputs: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown matrix or base, or a rank or size below one."""
        keep_whole(self, "Lora", "rank", "adapter_bytes")
        one_of("lora base", self.base, BASES)
        for target in self.targets:
            one_of("lora target", target, TARGETS)

    @property
    def product_bytes(self) -> int:
        """Of one element in the adapters' products."""
        return min(2, self.adapter_bytes) if self.autocast else self.adapter_bytes

    @property
    def base_bytes(self) -> float:
        """Bytes per parameter of a frozen matrix."""
        return BASE_BYTES[self.base]


def matrix_shapes(model: ModelShape) -> dict[str, tuple[int, int]]:
    """(in, out) of a block's matrices, by target name; a GPT block has no "gate"."""
    h, f, kv = model.hidden, model.feedforward, model.key_value_heads * model.head_dim
    q = model.attention_width
    shapes = {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "up": (h, f), "down": (f, h)}
    return shapes | ({"gate": (h, f)} if model.family == "llama" else {})


def kept_inputs(model: ModelShape, lora: Lora, width: int) -> tuple[float, float]:
    """Bytes per token that one block's adapters keep of their inputs: values, dropout masks.

    Values are copies in the type of the adapters' products. Without dropout, adapters in the type of the residual
    stream share one tensor (`width` bytes an element) where they share their input.
    """
    shapes = matrix_shapes(model)
    groups: dict[str, list[int]] = {}
    for name in lora.targets:
        source = "qkv" if name in ("q", "k", "v") else name if name in ("o", "down") else "mlp"
        groups.setdefault(source, []).append(shapes[name][0])
    alike = lora.product_bytes == width and not lora.adapter_dropout
    shared = {name: alike or (lora.fused and name == "qkv") for name in groups}
    values = sum(widths[0] if shared[name] else sum(widths) for name, widths in groups.items())
    return values * lora.product_bytes, values * lora.adapter_dropout


def adapter_parameters(model: ModelShape | str, lora: Lora) -> int:
    """Trainable parameters of all blocks.

    Raises:
        ValueError: the model's blocks have no such matrix.
    """
    model = model_shape(model)
    shapes = matrix_shapes(model)
    for target in lora.targets:
        one_of(f"lora target for {model.name}", target, tuple(shapes))
    return model.layers * lora.rank * sum(sum(shapes[name]) for name in lora.targets)
