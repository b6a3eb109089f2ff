"""How a model is trained: method, precision, optimizer, batch, and what is done to need less memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from utils.catalog import Device, device
from utils.rules import keep_whole, one_of

METHODS = {
    "full": "every weight is trained",
    "lora": "the model is frozen in 16 bits, adapters are trained in fp32",
    "qlora": "the model is frozen in four bits (NF4, double quantization), adapters are trained in fp32",
}
PRECISIONS = {
    "bf16-mixed": "bf16 autocast over fp32 trained weights: Trainer(bf16=True)",
    "fp16-mixed": "fp16 autocast and a loss scaler over fp32 trained weights: Trainer(fp16=True)",
    "bf16": "weights, gradients and moments in bf16, no autocast",
    "fp32": "everything in fp32",
}
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(fused=True), Trainer's own: two moments of the weights' type",
    "adamw-foreach": "torch.optim.AdamW as PyTorch makes it: the same, and copies while it steps",
    "paged-adamw": "bitsandbytes' PagedAdamW: two fp32 moments, in pages that may move to the host",
    "adamw-8bit": "bitsandbytes' AdamW8bit: two moments of one byte",
    "paged-adamw-8bit": "two moments of one byte in such pages",
    "adafactor": "torch.optim.Adafactor: one row and one column of a moment",
    "sgd": "torch.optim.SGD without momentum: no state",
}
LOSSES = {
    "whole": "logits of all tokens at once, as transformers' models compute it",
    "chunked": "torch's linear_cross_entropy: logits of some tokens at a time",
}
LONGEST_TOKENS, MOST_CARDS = 10_000_000, 1024


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train.

    Attributes:
        method: One of `METHODS`.
        rank, targets: Of the adapters, as peft takes them: "all-linear", or names of layers.
        precision: One of `PRECISIONS`. A frozen model is in 16 bits, unless all is in fp32.
        optimizer: One of `OPTIMIZERS`.
        tokens: In one sequence (for images and sound the model says how much one is).
        micro_batch: Sequences that pass through at a time, on each card.
        accumulation: Micro-batches of one optimizer step, on each card.
        checkpointing: Recompute each n-th block in backward: 1 for all, 0 for none.
        spared: Of all blocks each n-th is not recomputed after all: 3 leaves two thirds; 0 for none.
        loss: One of `LOSSES`.
        offload_activations: What backward needs waits in pinned host memory.
        offload_states: Parameters, gradients and optimizer states live in pinned host memory, where the
            CPU computes the optimizer's step (FSDP2's CPUOffloadPolicy), also of one card.
        step_in_backward: Each weight is updated as soon as its gradient is there, which then goes.
        cards: How many GPUs share parameters, gradients and optimizer states (FSDP2).
        sequence_cards: How many of them share the tokens of each text too (DeepSpeed-Ulysses); `tokens`
            are then those of all of them together.
    """

    method: str = "lora"
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    tokens: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: int = 0
    spared: int = 0
    loss: str = "whole"
    offload_activations: bool = False
    offload_states: bool = False
    step_in_backward: bool = False
    cards: int = 1
    sequence_cards: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError with the choice that would do."""
        one_of("method", self.method, tuple(METHODS))
        one_of("precision", self.precision, tuple(PRECISIONS))
        one_of("optimizer", self.optimizer, tuple(OPTIMIZERS))
        one_of("loss", self.loss, tuple(LOSSES))
        keep_whole(self, "recipe", "rank", "tokens", "micro_batch", "accumulation")
        keep_whole(self, "recipe", "cards", "sequence_cards")
        keep_whole(self, "recipe", "checkpointing", "spared", least=0)
        most = {"tokens": LONGEST_TOKENS, "micro_batch": 4096, "cards": MOST_CARDS}
        for name, limit in most.items():
            if getattr(self, name) > limit:
                raise ValueError(
                    f"recipe: {name} is {getattr(self, name):,}; {limit:,} is the most that is tried."
                )
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.spared == 1 or (self.spared and self.checkpointing != 1):
            raise ValueError(
                "recipe: spared=n leaves each n-th of all blocks out of checkpointing. Set "
                "checkpointing=1 and spared to 2 or more, or to 0."
            )
        if self.step_in_backward and self.accumulation > 1:
            raise ValueError(
                "recipe: step_in_backward drops each gradient at once, so there is none to "
                "accumulate. Set accumulation=1."
            )
        if self.step_in_backward and self.cards > 1:
            raise ValueError(
                "recipe: step_in_backward is tried on one card alone; FSDP2 reduces gradients of "
                "whole blocks. Set cards=1."
            )
        if self.cards > 1 and self.method == "qlora":
            raise ValueError(
                "recipe: FSDP2 of weights that bitsandbytes packs is not simulated. Choose "
                "method='lora' for several cards, or one card with method='qlora'."
            )
        self._check_offload()
        self._check_sequence()
        if self.precision == "fp32" and self.method == "qlora":
            raise ValueError("recipe: qlora computes in 16 bits. Choose precision='bf16-mixed'.")

    def _check_offload(self) -> None:
        if not self.offload_states:
            return
        if self.method == "qlora" or self.needs_bitsandbytes:
            raise ValueError(
                "recipe: on the host no weights or moments of bitsandbytes are stepped. Choose "
                "method='lora' or 'full' and optimizer='adamw' with offload_states=True."
            )
        if self.step_in_backward or self.precision == "fp16-mixed":
            raise ValueError(
                "recipe: with offload_states=True gradients are on the host, where neither "
                "step_in_backward nor a loss scaler of the card finds them. Choose "
                "step_in_backward=False and precision='bf16-mixed' or 'fp32'."
            )

    def _check_sequence(self) -> None:
        shared = self.sequence_cards
        if self.cards % shared:
            raise ValueError(
                f"recipe: {self.cards} card(s) are no whole groups of sequence_cards={shared}. "
                f"Set cards={shared}, or a multiple of it."
            )
        if self.tokens % shared:
            raise ValueError(
                f"recipe: {self.tokens:,} tokens are no equal parts for sequence_cards={shared}. "
                f"Set tokens={-(-self.tokens // shared) * shared}."
            )
        if shared > 1 and self.precision == "fp16-mixed":
            raise ValueError(
                "recipe: a text over several cards adds up its loss, which fp16 may not hold. Choose "
                "precision='bf16-mixed' or sequence_cards=1."
            )

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the model, on several cards or for its offload."""
        return self.cards > 1 or self.offload_states

    @property
    def step_tokens(self) -> int:
        """Of one optimizer step, on all cards."""
        return self.tokens * self.micro_batch * self.accumulation * self.texts_at_once

    @property
    def texts_at_once(self) -> int:
        """Groups of cards that have a text of their own."""
        return self.cards // self.sequence_cards

    @property
    def recomputed_share(self) -> float:
        """Of the blocks."""
        whole = 1 / self.checkpointing if self.checkpointing else 0.0
        return whole - (1 / self.spared if self.spared else 0.0)

    @property
    def is_frozen(self) -> bool:
        """Whether adapters alone are trained."""
        return self.method != "full"

    @property
    def autocast(self) -> str | None:
        """The type that products run in, "bf16" or "fp16"; None without autocast."""
        kind, _, mixed = self.precision.partition("-")
        return kind if mixed else None

    @property
    def weights(self) -> str:
        """The type in which weights are loaded, "bf16", "fp16" or "fp32"."""
        kind = self.precision.partition("-")[0]
        return kind if self.is_frozen or self.precision == "bf16" else "fp32"

    @property
    def products(self) -> str:
        """The type that packed layers compute in: "bf16" or "fp16"."""
        return self.autocast or "bf16"

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether it packs weights or moments."""
        return self.method == "qlora" or "8bit" in self.optimizer or "paged" in self.optimizer

    def check_card(self, gpu: Device) -> None:
        """Raises ValueError where the card computes no bfloat16 and the recipe asks for it."""
        if "bf16" in self.precision and not gpu.bf16_native:
            raise ValueError(
                f"recipe: the {gpu.name} computes no bfloat16, which PyTorch would emulate, slowly. "
                "Choose precision='fp16-mixed'."
            )

    def but(self, **changes: Any) -> Self:
        """The same recipe with `changes`. Raises ValueError as the constructor does."""
        return replace(self, **changes)

    def __str__(self) -> str:
        words = [self.method, self.precision, self.optimizer]
        if self.is_frozen:
            words[0] += f" of rank {self.rank} on {self._targets()}"
        if self.checkpointing:
            nth = "all blocks" if self.checkpointing == 1 else f"one block in {self.checkpointing}"
            words.append(f"{nth}{f' but one in {self.spared}' * bool(self.spared)} checkpointed")
        words += [
            word
            for word, on in (
                ("chunked loss", self.loss == "chunked"),
                ("activations on the host", self.offload_activations),
                ("states on the host", self.offload_states),
                ("step in backward", self.step_in_backward),
                (f"FSDP2 over {self.cards} cards", self.cards > 1),
                (f"each text over {self.sequence_cards} of them", self.sequence_cards > 1),
            )
            if on
        ]
        batch = f"{self.micro_batch} x {self.tokens:,} tokens"
        if self.accumulation > 1:
            batch += f", {self.accumulation} times accumulated"
        return f"{', '.join(words)}; {batch}"

    def _targets(self) -> str:
        if self.targets == "all-linear":
            return "all linear layers"
        return self.targets if isinstance(self.targets, str) else ", ".join(self.targets)


def mixed_precision(card: str) -> str:
    """What Trainer would be told on a card: bf16 where it computes that, else fp16.

    Raises:
        ValueError: no such card.
    """
    return "bf16-mixed" if device(card).bf16_native else "fp16-mixed"
