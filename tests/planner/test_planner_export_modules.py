"""What an exported script brings with it, and that a learner's own text never becomes code."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from export_cases import DEEP, TINY, tiny

from utils.planner.exporters.modules import modules


def test_modules_are_the_courses_own_files():
    root = Path(__file__).parents[2]
    found = tiny(DEEP, tp=2, pp=2).modules
    for path, text in found.items():
        if not path.endswith("__init__.py") or path == "utils/parallel/__init__.py":
            assert text == (root / path).read_text(), path
        else:
            assert len(text.splitlines()) == 1
    assert "utils/rules.py" in found  # what sizes may be
    copied = {path for path in found if path.startswith("utils/shims")}
    reader = {"__init__.py", "shim.py", "torch_checkpoint.py"}  # reads a save without running it
    assert copied == {f"utils/shims/{name}" for name in reader}


def test_modules_import_torch_and_each_other_alone():
    found = tiny(DEEP, cp=2, pp=2).modules | tiny(DEEP, tp=2, dp=2).modules
    for path, text in found.items():
        tree = ast.walk(ast.parse(text))
        names = [n.module or "" for n in tree if isinstance(n, ast.ImportFrom)]
        names += [
            a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names
        ]
        for name in names:
            top = name.split(".")[0]
            assert top in {"torch", *sys.stdlib_module_names} or name.startswith(
                (
                    "utils.parallel",
                    "utils.models.config",
                    "utils.rules",
                    "utils.catalog",
                    "utils.shims",
                )
            ), (path, name)


def test_an_import_that_would_bring_the_whole_course_is_refused():
    with pytest.raises(ValueError, match=re.escape("utils.models is no module of its own")):
        modules("from utils.models import Transformer")


HOSTILE = [
    'x"""\nimport os; os.system("echo bad")\n"""',
    "x\\",
    'x\\"""',
    'a\'b"c"""d',
    "$(touch bad) `id`; rm -rf",
    "one\ntwo\r\nthree",
    "\u2028 {0} {name} %(prog)s",
    '"',
    "\\N{BULLET}",
    "\\u12",
]


def test_half_a_character_is_no_name():
    with pytest.raises(ValueError, match="ModelShape: name .* half of a character"):
        replace(TINY, name="\ud800")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_models_name_never_becomes_code(name, tmp_path):
    plain, found = tiny(pp=2, dp=2), tiny(replace(TINY, name=name), pp=2, dp=2)
    tree, wanted = ast.parse(found.python), ast.parse(plain.python)
    assert name in ast.get_docstring(tree, clean=False)
    for parsed in (tree, wanted):
        del parsed.body[0]
    assert ast.dump(tree) == ast.dump(wanted)
    assert len(found.python.splitlines()) == len(plain.python.splitlines())
    assert (found.torchrun, found.megatron) == (plain.torchrun, plain.megatron)
    assert (found.deepspeed, found.modules) == (plain.deepspeed, plain.modules)
    found.write(tmp_path / "hostile")
    plain.write(tmp_path / "plain")
    for script in ("launch.sh", "megatron.sh"):
        assert (tmp_path / "hostile" / script).read_bytes() == (
            tmp_path / "plain" / script
        ).read_bytes()
