"""A tiny language model in a folder, with a tokenizer: as `from_pretrained` loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 14 layers in bf16, whose tokens are letters."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=14,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    letters = {chr(code): code for code in range(32, 127)} | {"<unk>": 0}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    (folder / "texts.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return folder
