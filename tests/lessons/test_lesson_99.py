"""The capstone's prose: every link leads to a cell, with an output, that holds what the link names."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
import torch

from evidence.validation.tables import table
from utils import Batch, Cluster, Plan, estimate
from utils.catalog import ModelShape
from utils.lessons.lesson_99.autocast import autocast_adds
from utils.lessons.lesson_99.bloom import bubble_share, noted_layouts, noted_micro_batches
from utils.lessons.lesson_99.peaks import draw_peaks
from utils.lessons.lesson_99.sayings import Saying, draw_sayings, seven_numbers
from utils.units import Evidence

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "notebooks/advanced/99_capstone.ipynb"
FOLKLORE = ROOT / "notebooks/00_folklore.ipynb"
LAB = ROOT / "sources/advanced/99_capstone/lab.py"
LINK = re.compile(r'\]\(([^)#\s]+\.ipynb)#(\S+?) "([^"]+)"\)')
ROWS_OF_FOLKLORE, QUESTIONS, SCENARIOS, SAYINGS = 26, 9, 12, 7


@functools.cache
def sections(path: Path) -> dict[str, list[str]]:
    """By anchor, the code cells with an output below a heading, those of its parts among them."""
    found: dict[str, list[str]] = {}
    above: dict[int, str] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            for marks, title in re.findall(r"^(#+) (.+)$", text, re.MULTILINE):
                anchor = title.strip().replace("`", "").replace(" ", "-")
                above = {level: name for level, name in above.items() if level < len(marks)}
                above[len(marks)] = anchor
                found.setdefault(anchor, [])
        elif cell.outputs and "check(" not in cell.source:  # a question proves nothing
            for level, anchor in above.items():
                if level > 1:  # the page's own title is no place
                    found[anchor].append(cell.source)
    return found


def prose(page: Path = LESSON) -> list[str]:
    cells = nbformat.read(page, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def answers() -> dict[str, str]:
    """By heading, the spoken answer: what is folded away below a question, without what fails."""
    found = {}
    for text in prose():
        for part in re.split(r"^### ", text, flags=re.MULTILINE):
            if re.match(r"Q\d\.", part):
                title, _, rest = part.partition("\n")
                folded = re.search(r"Answer</summary>(.*?)</details>", rest, re.DOTALL)
                assert folded and "*Fails:* " in folded[1], f"{title}: what is said, what fails"
                said, _, _ = folded[1].partition("*Fails:* ")
                found[title] = re.sub(r"\s+", " ", said).strip()
    return found


def rows() -> list[str]:
    """The folklore: rows of three cells."""
    lines = "\n".join(prose(FOLKLORE)).splitlines()
    table = [line for line in lines if re.match(r"\| (?!often said|---)", line)]
    return [line for line in table if line.count(" | ") == 2]


ALL = sorted(
    {
        (page, *link)
        for page in (LESSON, FOLKLORE)
        if page.is_file()
        for text in prose(page)
        for link in LINK.findall(text)
    }
)


@pytest.mark.parametrize(("page", "path", "anchor", "names"), ALL, ids=lambda part: str(part)[-40:])
def test_a_link_leads_to_a_cell_that_was_run(
    page: Path, path: str, anchor: str, names: str
) -> None:
    notebook = (page.parent / path).resolve()
    assert notebook.is_file(), f"{path} is not there"
    there = sections(notebook)
    assert unquote(anchor) in there, (
        f"{path} has no heading {unquote(anchor)!r}; it has {list(there)}"
    )
    cells = there[unquote(anchor)]
    assert any(names in source for source in cells), (
        f"no cell with an output below {anchor} has {names!r}"
    )


def test_every_row_of_folklore_has_a_cell() -> None:
    table = rows()
    assert len(table) == ROWS_OF_FOLKLORE, len(table)
    assert [row for row in table if not LINK.search(row)] == []


def test_every_sentence_of_every_answer_has_a_cell() -> None:
    """Each sentence of what is said ends with its own link; the test above follows it."""
    found = answers()
    assert len(found) == QUESTIONS, list(found)
    for question, said in found.items():
        linked = LINK.sub("@", said)
        sentences = re.split(r"(?<=[.?!]) (?=[A-Z*`\d])", linked.replace("**", ""))
        assert len(sentences) >= 4 and "**" in said, question
        assert [each for each in sentences if not re.search(r"@\W*$", each)] == [], question


def test_links_name_what_stands_in_one_section_only_once_read() -> None:
    """The anchor is that of a heading: no two of one notebook are alike among those linked."""
    for notebook in {(page.parent / path).resolve() for page, path, *_ in ALL}:
        if not notebook.is_file():
            continue
        titles = [
            title.strip()
            for cell in nbformat.read(notebook, as_version=4).cells
            if cell.cell_type == "markdown"
            for title in re.findall(
                r"^#+ (.+)$", re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE
            )
        ]
        linked = {
            unquote(anchor)
            for page, path, anchor, _ in ALL
            if (page.parent / path).resolve() == notebook
        }
        twice = {t for t in titles if titles.count(t) > 1 and t.replace(" ", "-") in linked}
        assert twice == set(), f"{notebook}: {twice}"


def test_sayings_are_drawn_by_how_far_off_they_are() -> None:
    rows = [
        Saying("a", 2, 1, "GB", Evidence.PREDICTED, "two of them"),
        Saying("b", 1, 4, "%", Evidence.PUBLISHED),
    ]
    (axes,) = draw_sayings(rows).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["a\nis true of: two of them", "b"], "the worst is on top"
    assert {text.get_text() for text in axes.texts} == {
        "said 2, right 1 GB (predicted)",
        "said 1, right 4 % (published)",
    }
    with pytest.raises(ValueError, match="numbers above zero"):
        draw_sayings([])
    with pytest.raises(ValueError, match="numbers above zero"):
        draw_sayings([rows[0]._replace(right=0.0)])


def test_seven_numbers_say_what_they_are_true_of() -> None:
    rows = seven_numbers()
    assert len(rows) == SAYINGS and all(row.true_of for row in rows)
    assert max(rows, key=lambda row: row.off).off == pytest.approx(9), "18 bytes over 2"


def test_bloom_noted_four_micro_batches_of_five_models() -> None:
    noted = noted_micro_batches()
    assert list(noted.index) == [1, 2, 4, 8] and len(noted.columns) == 5
    assert all(best in (2, 4) for best in noted.idxmin())
    kept = {float(row["sec_per_it"] or 0) for row in table("bloom_prequel")}
    shared = [seconds for seconds in noted.to_numpy().ravel() if seconds in kept]
    assert len(shared) == 11, "those of them that the planner's table has, too, are the same"
    assert bubble_share(10, 8) == pytest.approx(9 / 73)


def test_bloom_noted_layouts_in_the_order_of_their_seconds() -> None:
    noted, layouts = noted_micro_batches(), noted_layouts()
    assert [f"{gpus} A100, PP {stages}" for gpus, stages in layouts] == [
        name.partition(", ")[2] for name in noted.columns
    ]
    for gpus, stages in layouts:
        at_4, at_8 = (bubble_share(stages, micro, gpus // 8 // stages) for micro in (4, 8))
        assert 1.8 < at_8 / at_4 < 2, "half as many micro-batches: nearly twice the bubble"


def test_peaks_are_drawn_with_their_moment() -> None:
    one, batch = (
        Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1),
        Batch(sequences=4, sequence_length=1024),
    )
    peak = estimate("opt-1.3b", one, Plan(micro_batch=4, framework="fsdp"), batch).peak
    figure = draw_peaks({"4": {"as it is": peak}, "again": {"as it is": peak}}, title="t")
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["26.4, step"] * 2


def test_each_scenario_has_an_end_a_file_and_a_case() -> None:
    (text,) = (part for part in prose() if part.startswith("## 3. The scenarios"))
    lab = LAB.read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(table) == SCENARIOS
    for scenario, ends, file, case in table:
        links = LINK.findall(ends)
        assert links and f"hand_in({case.replace('`', chr(34))}" in lab, scenario
        pages = [(LESSON.parent / path).resolve() for path, *_ in links]
        written = [said for page in pages for said in _written(page)]
        assert any(file.strip("`") in each for each in written), f"{scenario}: {file} of {written}"


def _written(page: Path) -> list[str]:
    """What a lesson's outputs say that it wrote into `build/` for its reader."""
    cells = nbformat.read(page, as_version=4).cells
    lines = "\n".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))
    return re.findall(r"build/(lesson-\d\d[^\s:,]*)", lines)


def test_autocast_keeps_what_is_said_of_it() -> None:
    """By the tensors that Hugging Face's OPT saves: per block, under autocast and all in bf16."""
    tokens, hidden = 64, 128
    shape = ModelShape(
        name="tiny",
        family="gpt",
        layers=1,
        hidden=hidden,
        heads=2,
        feedforward=4 * hidden,
        vocabulary=128,
        max_sequence=tokens,
    )
    kept = {
        autocast: [_kept_by_opt(layers, hidden, tokens, autocast=autocast) for layers in (1, 3)]
        for autocast in (True, False)
    }
    (more, fewer) = (
        [(three - one) / 2 for one, three in zip(*kept[autocast], strict=True)]
        for autocast in (True, False)
    )
    _, activations = autocast_adds(shape, tokens)
    assert more[0] - fewer[0] == pytest.approx(activations, rel=0.02), "activations of a block"
    assert more[1] == 2 * 12 * hidden**2 and fewer[1] == 0, "bf16 copies of a block's matrices"


def _kept_by_opt(layers: int, hidden: int, tokens: int, *, autocast: bool) -> tuple[int, int]:
    """Bytes of activations, and of copies of weights, that wait for backward."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        vocab_size=128,
        max_position_embeddings=tokens,
        dropout=0.0,
        attn_implementation="sdpa",
    )
    model = OPTForCausalLM(config)
    model = model if autocast else model.bfloat16()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    matrices = {
        shape for p in model.parameters() if p.ndim == 2 for shape in (p.shape, p.t().shape)
    }
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64)).logits.float().sum()
    rows = [
        (tensor.untyped_storage().nbytes(), tensor.shape in matrices)
        for place, tensor in seen.items()
        if place not in own
    ]
    weights = sum(held for held, is_weight in rows if is_weight)
    return sum(held for held, _ in rows) - weights, weights
