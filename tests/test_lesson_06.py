"""Lesson 06 where bitsandbytes is missing, and the script that it writes, run as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.deepspeed  # transformers imports it
LESSON = Path(__file__).parents[1] / "notebooks/intermediate/06_seven_billion.ipynb"
BLOCK = """
import importlib.abc, importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "bitsandbytes" else find_spec(name, *a)

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_without_bitsandbytes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    book = nbformat.read(LESSON, as_version=4)
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "COURSE_SCOREBOARD": str(tmp_path / "scoreboard.json"),
    }
    client = NotebookClient(
        book,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(LESSON.parent)}},
    )
    client.execute(env=surroundings)  # raises where a cell ends in an error
    said = "".join(o.text for c in book.cells for o in c.get("outputs", []) if "text" in o)
    assert "bitsandbytes is not installed" in said
    assert "section 3 compares with no" in said
    assert "Without bitsandbytes there is no packed model to break." in said
    assert "section 5 is skipped" in said
    assert "base in 16 bits" in said and "base in 4 bits" not in said
    assert "ZeRO-2 + offload" not in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_runs_as_a_file(tmp_path: Path, ranks: int) -> None:
    """On a small Llama: trained, saved each epoch, merged, its peak told; with ZeRO-2 on two ranks."""
    pytest.importorskip("bitsandbytes")
    (tmp_path / "finetune.py").write_text(_script(), encoding="utf-8")
    _small_llama(tmp_path / "tiny")
    rows = [{"prompt": f"def add_{n}(x):", "answer": f" Adds {n}."} for n in range(10)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        sys.executable,
        *(launcher if ranks > 1 else []),
        "finetune.py",
        str(tmp_path / "tiny"),
    ]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GB (allocated); simulated for Llama-2-7B: " in done.stdout
    assert list((tmp_path / "adapter").glob("checkpoint-*/adapter_model.safetensors"))
    assert (tmp_path / "merged" / "model.safetensors").exists()


def _script() -> str:
    cells = nbformat.read(LESSON, as_version=4).cells
    (text,) = (
        o.text for c in cells for o in c.get("outputs", []) if "# written to" in o.get("text", "")
    )
    return text.partition("\n")[2]


def _small_llama(folder: Path) -> None:
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
