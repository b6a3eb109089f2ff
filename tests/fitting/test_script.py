"""The printed script runs as a file, on one process and two, with the losses of the same functions here."""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf

from utils.fitting import Recipe, Trials, model_config, recipe_step, script, training_program
from utils.fitting.__main__ import DOES_NOT_FIT, FITS, NOT_UNDERSTOOD, main
from utils.fitting.train_script import FLOORS, launch_line, requirements
from utils.fitting.train_script_run import report, steps_of, tokens_of
from utils.ranks.torchrun import run_torchrun

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
STEPS = 3
QUICK = ("adapters, checkpointed, accumulated", "four bits", "states on the host")
BASE = Recipe(tokens=64, micro_batch=2, rank=4, method="full", precision="fp32")
RECIPES = {
    "plain": BASE,
    "adapters, checkpointed, accumulated": BASE.but(
        method="lora",
        precision="bf16-mixed",
        checkpointing=1,
        spared=3,
        accumulation=2,
        micro_batch=1,
    ),
    "four bits": BASE.but(method="qlora", precision="bf16-mixed"),
    "chunked, on the host": BASE.but(loss="chunked", offload_activations=True, checkpointing=2),
    "step in backward": BASE.but(step_in_backward=True, optimizer="sgd"),
    "states on the host": BASE.but(offload_states=True),
}
SHARED = {
    "text shared": BASE.but(cards=2, sequence_cards=2),
    "text shared, chunked": BASE.but(cards=4, sequence_cards=2, method="lora", loss="chunked"),
}


@functools.cache
def trials_of(tiny: Path) -> Trials:
    """One for all tests here: each recipe is simulated once."""
    return Trials("tiny", model_config(tiny), "RTX 4090")


def written(folder: Path, recipe: Recipe, tiny: Path) -> Path:
    file = folder / "train.py"
    verdict = trials_of(tiny).verdict(recipe)
    file.write_text(script(verdict, hf.AutoModelForCausalLM, str(tiny)), encoding="utf-8")
    return file


def losses_of(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]


def losses_here(recipe: Recipe, tiny: Path, ranks: int = 1) -> list[float]:
    """Of the course's own functions in this process, on the texts of all ranks."""
    torch.manual_seed(0)
    packing: Any = {}
    if recipe.method == "qlora":
        packing["quantization_config"] = hf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    model: Any = hf.AutoModelForCausalLM.from_pretrained(
        tiny, dtype=recipe_step.DTYPES[recipe.weights], device_map={"": "cpu"}, **packing
    )
    if recipe.is_frozen:
        model = training_program.add_adapters(model, recipe.rank, recipe.targets)
    if recipe.autocast:
        training_program.autocast_forward(model, "cpu", recipe_step.DTYPES[recipe.autocast])
    optimizer = training_program.make_optimizer(recipe.optimizer, model.train().parameters(), 1e-4)
    rows = steps_of(
        str(tiny / "texts.txt"), str(tiny), "cpu",
        recipe.tokens, recipe.micro_batch, recipe.accumulation * ranks,
    )  # fmt: skip
    return [float(training_program.train_step(model, optimizer, next(rows))) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RECIPES],
)
def test_the_file_trains_as_the_course_does(name: str, tiny: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    file = written(tmp_path, recipe, tiny)
    assert "utils" not in file.read_text().replace("accelerate.utils", ""), "it needs no course"
    done = subprocess.run(
        [sys.executable, file, tiny / "texts.txt", tiny, str(STEPS)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No GPU here: peaks are not measured." in done.stdout
    assert losses_of(done.stdout) == pytest.approx(losses_here(recipe, tiny), abs=2e-4)
    if recipe.is_frozen:
        given = runpy.run_path(str(file)).get("FOUR_BITS")
        packing: Any = {"quantization_config": given} if given else {}
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "trained", **packing)
        kinds = {type(part).__name__ for part in loaded.modules()}
        assert ("Linear4bit" in kinds) == (recipe.method == "qlora"), "in four bits as trained"
    saved = {path.name for path in (tmp_path / "trained").iterdir()}
    assert ("adapter_model.safetensors" in saved) == recipe.is_frozen
    assert "tokenizer.json" in saved, "what was trained can be loaded with its tokenizer"


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one_that_has_both_texts(
    offload: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = BASE.but(cards=2, checkpointing=1, offload_states=offload)
    file = written(tmp_path, recipe, tiny)
    monkeypatch.chdir(tmp_path)  # it saves where it runs
    done = run_torchrun(file, 2, tiny / "texts.txt", tiny, STEPS, timeout_seconds=300)
    said = "\n".join(
        line.partition("step ")[1] + line.partition("step ")[2] for line in done.splitlines()
    )
    assert losses_of(said) == pytest.approx(losses_here(BASE, tiny, ranks=2), abs=2e-4)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"loss": "chunked", "accumulation": 2}, marks=pytest.mark.slow)]
)
def test_two_processes_that_share_each_text_train_as_one_that_has_it(
    changes: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = BASE.but(**changes)
    file = written(tmp_path, alone.but(cards=2, sequence_cards=2, checkpointing=1), tiny)
    monkeypatch.chdir(tmp_path)
    done = run_torchrun(file, 2, tiny / "texts.txt", tiny, STEPS, timeout_seconds=300)
    said = "\n".join("".join(line.partition("step ")[1:]) for line in done.splitlines())
    assert losses_of(said) == pytest.approx(losses_here(alone, tiny), abs=1e-4)
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert saved.config._attn_implementation == "sdpa", "it is loaded where no cards are"


def test_a_text_that_is_too_short_and_too_many_processes_end_in_a_sentence(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, BASE, tiny)
    (tmp_path / "short.txt").write_text("no")
    for arguments, ranks, says in (
        ([str(tmp_path / "short.txt"), str(tiny)], "1", "a step takes 128: give a longer text"),
        (
            [str(tiny / "texts.txt"), str(tiny)],
            "2",
            r"for 1 process\(es\), and 2 run. Start it with: python train.py",
        ),
    ):
        monkeypatch.setattr(sys, "argv", [str(file), *arguments])
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with pytest.raises(SystemExit, match=says):  # a sentence there is an exit code of 1
            runpy.run_path(str(file), run_name="__main__")


def test_the_file_pins_and_gathers_by_gloo_where_there_is_a_gpu(tiny: Path, tmp_path: Path) -> None:
    """No GPU is here: the lines that one takes are read."""
    text = written(tmp_path, RECIPES["states on the host"], tiny).read_text()
    assert "pinned = torch.cuda.is_available()" in text
    assert "CPUOffloadPolicy(pin_memory=pinned) if offload else" in text
    assert "    shard(model, offload=True)\n" in text and "device_map" not in text
    assert "joined(LAUNCH, 1)" in text and '"cpu:gloo,cuda:nccl"' in text


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


def test_lines_of_chats_and_texts_are_joined_each_with_its_end(tiny: Path, tmp_path: Path) -> None:
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.eos_token = "~"
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps({"text": "x~"}) + "\n")
    found = tokens_of(str(file), str(tmp_path / "model"))
    assert "".join(map(chr, found)) == "<ab><c>~x~"
    twice = steps_of(str(file), str(tmp_path / "model"), "cpu", 5, 1, 1, 2)
    rows = ["".join(map(chr, batch["input_ids"][0].tolist())) for (batch,) in twice]
    assert [sorted(rows[:2]), sorted(rows[2:])] == [["<ab><", "c>~x~"]] * 2, "each epoch has all"


def test_seconds_are_of_steps_and_peaks_are_after_loading(tiny: Path, tmp_path: Path) -> None:
    main = written(tmp_path, BASE, tiny).read_text().partition("def main(")[2]
    order = (
        "make(source",
        "reset_peak_memory",
        "in steps_of(",
        "began =",
        "train_step(",
        "seconds =",
    )
    places = [main.index(part) for part in order]
    assert places == sorted(places), "neither loading nor tokenizing is counted as a step's"


def test_each_epoch_has_another_order_and_ranks_share_no_row(tiny: Path) -> None:
    def rows(rank: int) -> list[list[int]]:
        given = str(tiny / "texts.txt"), str(tiny), "cpu", 64, 1, 1, 2
        return [batch["input_ids"][0].tolist() for (batch,) in steps_of(*given, rank, 2)]

    first, second = rows(0), rows(1)
    half = len(first) // 2
    assert rows(0) == first and first[:half] != first[half:], "shuffled, the same in each run"
    assert len(first) == len(second) and first != second


def test_a_row_may_hold_what_other_formats_take_for_the_end_of_a_line(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    separators = "".join(map(chr, (0x2028, 0x2029, 0x85)))
    rows = [{"text": f"a{separators}b"}, {"text": "c"}]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_bytes("\r\n".join(lines).encode())
    found = tokens_of(str(file), str(tiny))
    assert found[0] == ord("a") and found[-2:] == [ord("b"), ord("c")]


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": "a"}', '{"text": 3}', '{"messages": 3}'])
def test_a_line_that_is_no_row_is_named(line: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(SystemExit, match=r'rows\.jsonl, line 2: is no JSON with "text" or "mess'):
        tokens_of(str(file), str(tiny))


def test_the_head_of_the_file_says_how_to_install_and_start_it(tiny: Path, tmp_path: Path) -> None:
    recipe = BASE.but(method="qlora", precision="bf16-mixed")
    text = written(tmp_path, recipe, tiny).read_text()
    assert f"pip install {requirements(recipe)}" in text and launch_line(recipe) in text
    named = [part.strip('"').partition(">=")[0] for part in requirements(recipe).split()]
    assert named == ["torch", "transformers", "accelerate", "peft", "bitsandbytes"]
    assert '"torch>=2.13"' in requirements(recipe.but(loss="chunked")), "older ones lack that loss"
    course = Path("pyproject.toml").read_text()
    assert all(f'"{name}>={floor}"' in course for name, floor in FLOORS.items()), (
        "tested from there"
    )
    assert "A step takes about" in text and "tokens a second" in text
    assert '.from_pretrained("trained", quantization_config=FOUR_BITS)\n' in text
    assert "nproc-per-node 4" in launch_line(BASE.but(cards=4))


@pytest.mark.parametrize("name", RECIPES | SHARED)
def test_the_file_has_no_part_that_it_does_not_use(name: str, tiny: Path, tmp_path: Path) -> None:
    recipe = (RECIPES | SHARED)[name]
    text = written(tmp_path, recipe, tiny).read_text()
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", tmp_path],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    defined = {line.split("(")[0][4:] for line in text.splitlines() if line.startswith("def ")}
    assert all(text.count(name) > 1 for name in defined), "each function is called"
    assert ("torch.distributed" in text) == recipe.is_sharded
    assert ("rank // 2, ranks // 2)" in text) == (recipe.sequence_cards == 2)


def test_the_command_answers_by_exit_code_and_json(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [str(tiny), "--tokens", "64", "--no-cures"]
    assert main([*small, "--json", "--script", str(tmp_path / "train.py")]) == FITS
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["evidence"] == {"bytes": "simulated", "seconds": "predicted"}
    assert (tmp_path / "train.py").read_text().startswith('"""Trains')
    assert (
        main([str(tiny), "--tokens", "65536", "--micro-batch", "64", "--no-cures"]) == DOES_NOT_FIT
    )
    assert "are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Qwen/Qwen2.5-8B"], "Qwen2.5-7B"),
        (["{tiny}", "--card", "RTX 5"], "RTX"),
        (["{tiny}", "--tokens", "0"], "1 or more"),
        (["{tiny}", "--targets", "nothing"], "nothing"),
        (["{tiny}", "--method", "qlora", "--cards", "2"], "method='lora'"),
    ],
)
def test_the_command_says_what_was_wrong(
    arguments: list[str], says: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.format(tiny=tiny) for text in arguments]
    assert main([*filled, "--no-cures"]) == NOT_UNDERSTOOD
    assert says in capsys.readouterr().err


def test_where_the_recipe_does_not_fit_the_script_is_of_the_set_that_does(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    large = ["--tokens", "256", "--micro-batch", "1024", "--method", "full", "--card", "T4"]
    assert main([str(tiny), *large, "--script", str(file)]) == DOES_NOT_FIT
    said, text = capsys.readouterr().out, file.read_text()
    assert "Together:" in said and f"wrote {file}" in said
    assert "torch.bfloat16" not in text, "a T4 computes none"
    compile(text, "train.py", "exec")
    asked = Recipe(method="full", tokens=256, micro_batch=1024, precision="fp16-mixed")
    assert f": {asked}." not in text, "the recipe that does not fit is not what is written"


@pytest.mark.parametrize(("peak_bytes", "is_told"), [(1040, False), (1060, True), (940, True)])
def test_a_peak_more_than_5_percent_from_the_simulated_is_told(
    peak_bytes: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = {
        "max_memory_allocated": peak_bytes,
        "mem_get_info": (500, 2000),
        "max_memory_reserved": 1200,
        "memory_reserved": 1100,
    }
    for name, says in card.items():
        monkeypatch.setattr(torch.cuda, name, lambda says=says: says)
    report([2.0], "cuda:0", 0.5, 1000, 0.4, 400)
    said = capsys.readouterr().out
    assert ("More than 5% apart" in said) == is_told and "0.50 s measured, 0.40 s predicted" in said
    report([2.0] * 3, "cuda:0", 0.5, 1000, 0.4, 400)  # 400 are left, and are enough
    with pytest.raises(SystemExit, match="the next fragment may end the run"):
        report([2.0] * 3, "cuda:0", 0.5, 1000, 0.4, 401)
