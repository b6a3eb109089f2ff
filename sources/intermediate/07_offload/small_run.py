"""The lesson's script as its owner runs it: by torchrun, in a folder of its own, on a tiny Llama."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from utils.checked import check_public
from utils.lessons.blocks import small_llama

__all__ = ["ScriptRun", "run_small"]

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
PIECES, LINE = 16, "a line of text"
MOST_TOKENS = 65_536  # of a piece
SECONDS = 300


class ScriptRun(NamedTuple):
    """What a run of the script left behind.

    Attributes:
        losses: One a step.
        saved: Files of weights, relative to the script's folder.
        last_line: That it printed.
    """

    losses: list[float]
    saved: list[str]
    last_line: str


def run_small(script: Path, folder: Path, length: int) -> ScriptRun:
    """Run a script that takes a model's folder, and reads `texts.txt`, on the CPU.

    Args:
        script: its file.
        folder: where its model, its texts and what it saves go.
        length: of its pieces, in tokens; there are texts for `PIECES` of them.

    Raises:
        ValueError: `length` is no text's: below 1, or above `MOST_TOKENS`.
        RuntimeError: it failed, with the last that it said.
        subprocess.TimeoutExpired: it takes longer than `SECONDS`.
    """
    if not 1 <= length <= MOST_TOKENS:
        raise ValueError(f"length={length}: a piece of a text has 1 to {MOST_TOKENS:,} tokens.")
    _tiny_model(folder / "tiny")
    lines = PIECES * length // (len(LINE) + 1) + 1  # a token a byte, and one that ends the line
    (folder / "texts.txt").write_text(f"{LINE}\n" * lines, encoding="utf-8")
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *LAUNCH, str(script.resolve()), "tiny"],
        cwd=folder,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} failed: {done.stderr[-2000:]}")
    losses = [float(each) for each in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    saved = sorted(str(file.relative_to(folder)) for file in folder.glob("tuned/**/*.safetensors"))
    return ScriptRun(losses, saved, done.stdout.strip().splitlines()[-1])


def _tiny_model(folder: Path) -> None:
    """A Llama and its tokenizer, whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    small_llama(vocab_size=512, max_position_embeddings=4096, **sizes).save_pretrained(folder)


check_public(globals())
