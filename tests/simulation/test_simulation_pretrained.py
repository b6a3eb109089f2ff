"""`from_pretrained` inside `build()`, in each form that people write, with a model that the test saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from evidence.validation.simulation_cpu import state_maxima
from utils.memory import Category, measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import SimulationError, simulate
from utils.simulation.checkpoint_files import HeaderFile

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
A100 = "A100 80GB"
AUTO = hf.AutoModelForCausalLM
TINY = hf.LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)
FOUR_BIT = hf.BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tiny Llama in bf16: in one file, in several, and as the Hub's cache has it."""
    folder = tmp_path_factory.mktemp("models")
    model = hf.LlamaForCausalLM(TINY).to(torch.bfloat16)
    model.save_pretrained(folder / "tiny")
    model.save_pretrained(folder / "sharded", max_shard_size="100KB")
    cached, commit = folder / "hub" / "models--me--tiny", "a" * 40
    shutil.copytree(folder / "tiny", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    return folder


@pytest.fixture
def copied(models: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(models / "tiny", tmp_path / "copy"))


FORMS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda at: AUTO.from_pretrained(at / "tiny", dtype=torch.bfloat16),
    "device_map": lambda at: AUTO.from_pretrained(at / "tiny", dtype="auto", device_map="auto"),
    "BitsAndBytesConfig": lambda at: AUTO.from_pretrained(
        at / "tiny", quantization_config=FOUR_BIT, device_map={"": 0}
    ),
    "dtype auto": lambda at: AUTO.from_pretrained(at / "tiny", dtype="auto"),
    "a class and a folder's name": lambda at: hf.LlamaForCausalLM.from_pretrained(
        str(at / "tiny"), dtype="auto"
    ),
    "the Hub's cache": lambda at: AUTO.from_pretrained(
        "me/tiny", cache_dir=at / "hub", dtype="auto"
    ),
    "sharded": lambda at: AUTO.from_pretrained(at / "sharded", dtype="auto"),
    "to after": lambda at: AUTO.from_pretrained(at / "tiny", dtype="auto").to("cuda"),
}


def built(form: str, at: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = FORMS[form](at).train()
    return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def from_configuration(where: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = hf.LlamaForCausalLM(TINY).to(where, torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any) -> None:
    tokens = torch.randint(1000, (2, 64), device=next(model.parameters()).device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a file of weights was opened for its values")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_its_weights_and_reads_no_values(
    form: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (safetensors, safetensors.torch, hf.modeling_utils):
        monkeypatch.setattr(module, "safe_open", refused)
    found = simulate(lambda: built(form, models), step, device=A100)
    if form != "BitsAndBytesConfig":
        where = "cuda" if form in ("device_map", "to after") else "cpu"
        whole = simulate(lambda: from_configuration(where), step, device=A100)
        assert found.peak_bytes == whole.peak_bytes
        assert state_maxima(found) == state_maxima(whole)
        return
    packed = 2 * (4 * 128 * 128 + 3 * 128 * 256) // 2
    norms = 5 * 512  # each a block of the allocator
    assert state_maxima(found)[Category.PARAMETERS] == packed + norms + 2 * 2 * 1024 * 128


def test_loaded_on_a_cpu_it_is_what_the_allocator_counts(models: Path) -> None:
    if not isinstance(source_for(torch.device("cpu")), CountingSource):
        pytest.skip("needs the counting allocator, and so a C++ compiler")
    simulated = simulate(lambda: built("plain", models), step, device="cpu")
    model, optimizer = built("plain", models)
    real = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)


def test_safetensors_reads_values_again_afterwards(models: Path) -> None:
    simulate(lambda: built("plain", models), step, device=A100)
    assert load_file(models / "tiny" / "model.safetensors")["lm_head.weight"].abs().sum() > 0


def test_a_state_that_the_program_loads_itself(models: Path) -> None:
    def build() -> nn.Module:
        model = hf.LlamaForCausalLM(TINY)
        model.load_state_dict(load_file(models / "tiny" / "model.safetensors"))
        return model

    found = simulate(build, lambda model, _: model(torch.ones(1, 4, dtype=torch.long)), device=A100)
    assert found.peak_bytes > 0


def said(load: Callable[[], Any]) -> str:
    with pytest.raises(SimulationError, match=r", line \d+.*build\(\) ") as raised:
        simulate(load, lambda model, _: None, device=A100)
    return str(raised.value)


def test_a_folder_that_is_no_model(tmp_path: Path, copied: Path) -> None:
    assert "save_pretrained() wrote" in said(lambda: AUTO.from_pretrained(tmp_path))
    assert "save_pretrained() wrote" in said(lambda: AUTO.from_pretrained(tmp_path / "nothing"))
    (copied / "model.safetensors").unlink()
    assert "no file named model.safetensors" in said(lambda: AUTO.from_pretrained(copied))
    (copied / "config.json").write_text('{"model_type": "lla')
    assert "not a valid JSON" in said(lambda: AUTO.from_pretrained(copied))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: whole[:100], "cut off"),
        (lambda whole: whole[:-1000], "are there"),
        (lambda whole: b"", "cut off"),
        (lambda whole: whole[:8] + b"x" * (len(whole) - 8), "damaged"),
        (lambda whole: b"no model, but a text of some length", "no file of safetensors"),
    ],
)
def test_damaged_weights(copied: Path, content: Callable[[bytes], bytes], words: str) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    text = said(lambda: AUTO.from_pretrained(copied))
    assert words in text and "model.safetensors" in text and "again" in text


def test_a_file_of_a_shard_that_is_missing(models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models / "sharded", tmp_path / "copy"))
    gone = sorted(folder.glob("model-*"))[2]
    gone.unlink()
    assert gone.name in said(lambda: AUTO.from_pretrained(folder))


def test_code_of_a_repository_is_not_run_unasked(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    mine = {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}
    (copied / "config.json").write_text(json.dumps({**config, **mine}))
    (copied / "own.py").write_text(f"open({str(copied / 'ran')!r}, 'w').close()")
    assert "trust_remote_code=True" in said(lambda: AUTO.from_pretrained(copied))
    assert not (copied / "ran").exists()


@pytest.mark.parametrize("name", ["me/unknown", "meta-llama/Llama-2-7b-hf"])
def test_names_that_this_machine_does_not_have(name: str, models: Path) -> None:
    text = said(lambda: AUTO.from_pretrained(name, cache_dir=models / "hub"))
    assert "downloads nothing" in text and "hf download" in text


def test_four_bits_by_an_argument_of_its_own(models: Path) -> None:
    load = lambda: AUTO.from_pretrained(models / "tiny", load_in_4bit=True)  # noqa: E731
    assert "BitsAndBytesConfig(load_in_4bit=True)" in said(load)


def test_the_readme_has_it_in_twelve_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (b.partition("```")[0] for b in text.split("```python\n")[1:] if "simulate(" in b)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 12
    exec(compile(block, "README.md", "exec"), {})
    assert "Fits the " in capsys.readouterr().out


def test_a_header_says_what_safetensors_says(models: Path) -> None:
    path = models / "tiny" / "model.safetensors"
    with safetensors.safe_open(path, framework="pt") as real, HeaderFile(path) as ours:
        assert sorted(real.keys()) == sorted(ours.keys())
        assert real.metadata() == ours.metadata()
        for name in real.keys():  # noqa: SIM118
            one, other = real.get_tensor(name), ours.get_tensor(name)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
