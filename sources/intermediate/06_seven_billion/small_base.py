"""A small Llama that has read Python's sources, in a folder as a base comes from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from utils.data import text_batches, text_tokens

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase

TEXT_BYTES = 200_000
STEPS = 60


def write_small_base(
    folder: Path, config: LlamaConfig, device: torch.device
) -> tuple[float, float]:
    """Train it on `device` for `STEPS` steps; configuration, weights and tokenizer go to `folder`.

    Returns:
        The loss of the first step and of the last, in nats per token.
    """
    from transformers import LlamaForCausalLM

    text = bytes(text_tokens(TEXT_BYTES).tolist()).decode(errors="replace")
    tokenizer = _tokenizer(text, config.vocab_size)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = text_batches(torch.tensor(tokenizer(text).input_ids), batch=8, sequence=64)
    losses = []
    for _ in range(STEPS):
        tokens = next(batches)[0].to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses[0], losses[-1]


def _tokenizer(text: str, entries: int) -> PreTrainedTokenizerBase:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = tokenizers.Tokenizer(tokenizers.models.BPE())
    pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["</s>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    pairs.train_from_iterator(text.splitlines(True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="</s>", pad_token="</s>")
