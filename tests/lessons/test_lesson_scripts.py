"""The scripts that lessons write, run as their owners would: as files, with their launchers, small."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest
import torch

from utils.start import Here

pytestmark = pytest.mark.deepspeed  # transformers imports it
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.slow
def test_lesson_02_trains_in_mixed_precision(tmp_path: Path) -> None:
    _put(tmp_path, "beginner/02_mixed_precision", "resnet50_amp.py")
    printed = _run(tmp_path, (), "resnet50_amp.py", "8", "1", "fake")
    assert re.search(r"epoch 0: loss \d+\.\d+, accuracy \d+\.\d%, \d+ images/s", printed), printed
    assert "bf16; simulated for batch 1024 in fp16 on a T4: " in printed
    again = _run(tmp_path, (), "resnet50_amp.py", "8", "2", "fake")
    assert re.findall(r"epoch \d+", again) == ["epoch 1"], "it goes on from what it saved"
    assert not list(tmp_path.glob("*.new")), "what it saves is moved to its place"


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--amp", "--channels-last")])
def test_lesson_04_trains_on_two_ranks(tmp_path: Path, how: Sequence[str]) -> None:
    """Its model, saved, has the accuracy that both ranks told together, in either layout."""
    _put(tmp_path, "beginner/04_four_ranks", "train.py")
    small = ("--network", "resnet18", "--epochs", "1", "--fake")
    printed = _run(tmp_path, (*TORCHRUN, "2"), "train.py", *small, *how)
    told, loaded = re.findall(r"accuracy (\d+\.\d)%, test loss (\d+\.\d{4})", printed)
    assert told[0] == loaded[0] and (tmp_path / "model.pt").exists()
    assert float(told[1]) == pytest.approx(float(loaded[1]), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_lesson_06_fine_tunes_adapters(tmp_path: Path, ranks: int) -> None:
    """Trained, saved each epoch, merged, its peak told; by data parallelism on two ranks."""
    pytest.importorskip("bitsandbytes")
    _put(tmp_path, "intermediate/06_seven_billion", "finetune.py")
    rows = [{"prompt": f"def add_{n}(x):", "answer": f" Adds {n}."} for n in range(10)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    printed = _run(tmp_path, launcher, "finetune.py", _small_llama(tmp_path / "tiny"))
    assert "GB (allocated); simulated for Llama-2-7B: " in printed
    assert list((tmp_path / "adapter").glob("checkpoint-*/adapter_model.safetensors"))
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_lesson_07_fine_tunes_all_weights(tmp_path: Path) -> None:
    """By ZeRO-2 with its optimizer on the host: saved, its peak told, one loss on one rank and two."""
    _put(tmp_path, "intermediate/07_offload", "offload.py")
    (tmp_path / "texts.txt").write_text("a line of text\n" * 2200, encoding="utf-8")
    model, losses = _small_llama(tmp_path / "tiny"), []
    for ranks in (1, 2):
        printed = _run(tmp_path, (*TORCHRUN, str(ranks)), "offload.py", model)
        assert "GB (allocated); simulated for Llama-2-7B: " in printed
        losses.append(printed.partition("'loss': '")[2].partition("'")[0])
        assert list((tmp_path / "tuned").glob("checkpoint-*/model.safetensors"))
        shutil.rmtree(tmp_path / "tuned")
    assert float(losses[0]) == float(losses[1])


def test_a_script_that_is_no_python(tmp_path: Path, here: Here) -> None:
    with pytest.raises(SyntaxError):
        here.write_script("odd.py", "def f(:")
    assert not (here.root / "build").exists()


def test_functions_and_text_in_their_order(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_script(
        "both.py",
        "import sys\nfrom pathlib import Path",
        _small_llama,
        'if __name__ == "__main__": sys.exit(3)',
    )
    path = here.root / "build" / "lesson-06" / "both.py"
    assert capsys.readouterr().out.startswith("# written to build/lesson-06/both.py\nimport sys\n")
    assert subprocess.run([sys.executable, str(path)]).returncode == 3


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here("intermediate/06", torch.device("cpu"), 2**30, torch.float32, "", "tiny", tmp_path)


def _put(folder: Path, notebook: str, name: str) -> None:
    """The script as the stored notebook printed it."""
    cells = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    printed = [o.get("text", "") for cell in cells for o in cell.get("outputs", [])]
    (text,) = (each for each in printed if each.startswith("# written to"))
    (folder / name).write_text(text.partition("\n")[2], encoding="utf-8")


def _run(folder: Path, launcher: Sequence[str], name: str, *arguments: str) -> str:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, name, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=hidden, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _small_llama(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = ["</s>", *pre_tokenizers.ByteLevel.alphabet()]
    bytewise = Tokenizer(
        models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>").save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    ).save_pretrained(folder)
    return str(folder)
