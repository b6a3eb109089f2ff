"""Runs the lines of lesson 08's last cell."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from utils.lessons.blocks import run_block, small_llama
from utils.ranks import run_ranks

from .bytes_llama import bytes_llama
from .library_text import held_out_sequences
from .rounding import round_to_nearest
from .weight_only import linears_of


def block_1(text: str) -> None:
    """What rounding costs: the lesson's own, in place, and the head is left; experts in one tensor are refused."""
    plain, model = bytes_llama(), bytes_llama().train()
    batches = held_out_sequences().split(16)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = run_block(text, model=model, batches=batches, loss_of=_loss_of)
    for path, layer in linears_of(model.blocks).items():
        before = linears_of(plain.blocks)[path].weight
        expected = round_to_nearest(before, found["bits"], found["group"]).weight()
        # Not to the digit: the lesson keeps scales in 16 bits.
        off, by_lesson = (layer.weight - before).norm(), (expected - before).norm()
        assert abs(off / by_lesson - 1) < 0.02, (
            f"{path}: off by {off:.4f}, the lesson's {by_lesson:.4f}"
        )
    assert torch.equal(model.head.weight, plain.head.weight), "the head was rounded"
    assert not model.training, "dropout would be in both arms"
    assert "of the weights: perplexity +" in said.getvalue(), said.getvalue()
    assert "standard error" in said.getvalue(), said.getvalue()
    assert found["share"] > 0.8, f"only {found['share']:.0%} of the weights were rounded"
    assert 0 < found["cost"] < 0.02, f"{found['cost']:.4f} nats is not what few bits cost"
    assert 0 < found["error"] < found["cost"], f"standard error {found['error']:.4f} nats"
    _refuses_fused_experts(text)


def _refuses_fused_experts(text: str) -> None:
    """Experts in one tensor, as transformers 5 keeps them, are no `nn.Linear`."""
    experts = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.zeros(4, 256, 128))})
    try:
        run_block(text, model=nn.ModuleDict({"experts": experts}), batches=[], loss_of=_loss_of)
    except AssertionError as refused:
        assert "experts.gate_up_proj is no nn.Linear" in str(refused), refused
    else:
        raise AssertionError("experts in one tensor stay in 16 bits, and nothing is said")


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def block_2(text: str) -> None:
    """GPTQ: rounded, saved, reloaded, and both arms read the same held-out texts."""
    said, saved = run_ranks(_with_stand_in, 1, text)[0]
    assert "standard error" in said and "9 texts" in said, said
    assert "perplexity +0.00%" not in said, "what was reloaded is the plain model"
    assert saved == 256, f"{saved} calibration texts came to quantize()"


def block_3(text: str) -> None:
    """fp8: a recipe for all linear layers but the head, and a folder with model and tokenizer."""
    recipe, files = run_ranks(_with_compressor, 1, text)[0]
    assert recipe == {"targets": "Linear", "scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}, recipe
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files), files


def block_4(text: str) -> None:
    """Tasks in three arms, and one change from each to the next."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    runs = [shlex.split(line) for line in lines]
    assert all(run[:4] == ["lm_eval", "--model", "vllm", "--model_args"] for run in runs), lines
    assert all(run[5:] == ["--tasks", "gsm8k"] for run in runs), lines
    arms = [dict(pair.split("=", 1) for pair in run[4].split(",")) for run in runs]
    plain, few, narrow = arms
    assert plain == {"pretrained": "$MODEL_NAME"}, plain
    assert few == {"pretrained": "$FOLDER"}, few
    assert narrow == few | {"kv_cache_dtype": "fp8"}, narrow


class _StandIn:
    """GPTQModel's calls as the page writes them, around plain rounding: the library itself needs a GPU."""

    def __init__(self, model: Any, settings: dict[str, int] | None) -> None:
        self.model, self.settings, self.texts = model, settings, 0

    @classmethod
    def load(cls, folder: str, settings: dict[str, int] | None = None) -> _StandIn:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder), settings)

    @torch.no_grad()
    def quantize(self, texts: list[str]) -> None:
        assert self.settings, "quantize() needs a QuantizeConfig at load()"
        self.texts = len(texts)
        for layer in linears_of(self.model.get_submodule("model.layers")).values():
            made = round_to_nearest(
                layer.weight, self.settings["bits"], self.settings["group_size"]
            )
            layer.weight.copy_(made.weight())

    def save(self, folder: str) -> None:
        self.model.save_pretrained(folder)


def _with_compressor(text: str) -> tuple[dict[str, Any], list[str]]:
    """The recipe that came to `oneshot`, and what the block saved; llm-compressor itself is not installed."""
    warnings.simplefilter("ignore")  # libraries call each other by old names
    seen: dict[str, Any] = {}
    names = ("llmcompressor", "llmcompressor.modifiers", "llmcompressor.modifiers.quantization")
    stands = {name: ModuleType(name) for name in names}
    vars(stands[names[0]])["oneshot"] = lambda model, recipe: seen.update(recipe)
    vars(stands[names[2]])["QuantizationModifier"] = dict
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, stands):
        _save_small_model(folder)
        few = f"{folder}/few"
        with contextlib.redirect_stdout(io.StringIO()):
            run_block(text, model_name=folder, folder=few)
        return seen, [path.name for path in Path(few).iterdir()]


def _save_small_model(folder: str) -> None:
    from transformers import PreTrainedTokenizerFast

    letters = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    small_llama(hidden_size=128, intermediate_size=256).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def _with_stand_in(text: str) -> tuple[str, int]:
    """What the block prints, and how many texts it calibrated on."""
    warnings.simplefilter("ignore")  # libraries call each other by old names
    library = ModuleType("gptqmodel")
    vars(library).update(GPTQModel=_StandIn, QuantizeConfig=dict)
    texts = [
        held_out[: 40 + place] for place, held_out in enumerate(["the weights of a model " * 3] * 8)
    ]
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, gptqmodel=library):
        _save_small_model(folder)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found = run_block(
                text,
                model_name=folder,
                calibration=texts * 40,
                held_out=[*texts, "a", texts[0] * 60],  # one without a next token, one that is cut
                folder=f"{folder}/few",
            )
    return said.getvalue(), found["few"].texts
