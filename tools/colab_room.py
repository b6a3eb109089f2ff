"""Runs lessons as Colab would: its versions, its folder, `google.colab`, no .venv, no constraints.

python tools/colab_room.py first                  the set-up cells of every lesson and lab
python tools/colab_room.py make ENV               an environment with Colab's versions
python tools/colab_room.py whole ENV [PATH ...]   whole lessons in it; says what they skip

What Colab brings along stands in colab_versions.txt, as published. The address that Colab would
clone is played by this repository's last commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert.filters import strip_ansi
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = Path(__file__).with_name("colab_versions.txt")
CELL_SECONDS = 600
SKIPPED = re.compile(
    r"^.*\b(?:skip\w*|left out|not installed|is missing)\b.*$", re.MULTILINE | re.I
)
# Run in the Python that stands for Colab's: each notebook's cells down to the one tagged "setup".
DRIVER = r"""
import importlib.metadata, json, os, subprocess, sys, types
task = json.load(sys.stdin)
google = sys.modules.setdefault("google", types.ModuleType("google"))
google.colab = sys.modules["google.colab"] = types.ModuleType("google.colab")
real_version, real_run = importlib.metadata.version, subprocess.run
def version(name):
    if name in task["bring"]: return task["bring"][name]
    if name in task["needs"]: raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
def run(command, *rest, **more):
    if "pip" in command:
        asked.append(command[command.index("--no-deps") + 1:])
        return subprocess.CompletedProcess(command, 0, "", "")
    return real_run(command, *rest, **more)
importlib.metadata.version, subprocess.run = version, run
found = {}
for name, cells in task["notebooks"].items():
    asked, path = [], list(sys.path)
    try:
        space = {"__name__": "__main__"}
        for cell in cells: exec(compile(cell, name, "exec"), space)
        found[name] = {"error": "", "installs": sum(asked, [])}
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}", "installs": sum(asked, [])}
    sys.path[:] = path
print("\n" + json.dumps(found))
"""


def brought() -> dict[str, str]:
    """Name and version of what Colab brings along."""
    lines = VERSIONS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def as_on_colab(notebook: NotebookNode, address: str) -> NotebookNode:
    """The notebook with an address to clone from, as it has one once the course is published."""
    for cell in notebook.cells:
        if "bootstrap" in cell.metadata.get("tags", []):
            cell.source = re.sub(r'repository="[^"]*"', f'repository="{address}"', cell.source)
    return notebook


def first_cells(notebook: NotebookNode) -> list[str]:
    """The code of a notebook down to its set-up cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = next(i for i, cell in enumerate(code) if "setup" in cell.metadata.get("tags", []))
    return [cell.source for cell in code[: last + 1]]


def notebooks(folders: Sequence[str] = ("notebooks", "labs")) -> list[Path]:
    """All that a learner opens on Colab."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.ipynb"))]
    prose = {page.parent.name for page in (ROOT / "sources").rglob("page.py")}
    return [p for p in found if ".ipynb_checkpoints" not in p.parts and p.stem not in prose]


def run_first(paths: Sequence[Path], python: str = sys.executable) -> dict[str, dict]:
    """Run the first cells of notebooks one after the other, in an empty folder.

    Returns:
        For each notebook its "error", "" if none, and what it would have installed, "installs".
    """
    address = ROOT.as_uri()
    cells = {
        path.relative_to(ROOT).as_posix(): first_cells(
            as_on_colab(nbformat.read(path, as_version=4), address)
        )
        for path in paths
    }
    needs = [name for name in dependencies() if name not in brought()]
    task = json.dumps({"notebooks": cells, "bring": brought(), "needs": needs})
    with tempfile.TemporaryDirectory() as content:
        done = subprocess.run(
            [python, "-c", DRIVER],
            input=task,
            cwd=content,
            text=True,
            capture_output=True,
            env=environment(Path(content)),
        )
    if done.returncode:
        raise RuntimeError(f"The stand-in for Colab stopped:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def dependencies() -> list[str]:
    """The names of what the course needs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\ndependencies = [")[2].partition("]")[0]
    return re.findall(r'"([\w-]+)', block)


def environment(content: Path) -> dict[str, str]:
    """A shell's variables without anything of this repository's environment."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return kept | {
        "HOME": str(content),
        "CUDA_VISIBLE_DEVICES": "",
        "KINETO_LOG_LEVEL": "99",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_NO_INDEX": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def make(folder: Path) -> None:
    """An environment with Colab's versions, without what Colab does not bring.

    Raises:
        subprocess.CalledProcessError: uv failed, and has said why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run(
        [*uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)], check=True
    )
    needs = [line for line in VERSIONS.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    python = folder / "bin/python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), *needs], check=True)
    stand_in = next(folder.glob("lib/python*/site-packages")) / "google/colab"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text('"""Stands for Colab\'s own module."""\n')


def run_whole(env: Path, path: Path, content: Path) -> tuple[str, list[str]]:
    """Run one notebook from Colab's folder; its error, "" if none, and the sentences on skips."""
    notebook = as_on_colab(nbformat.read(path, as_version=4), ROOT.as_uri())
    specs = content / "kernels/colab"
    specs.mkdir(parents=True, exist_ok=True)
    argv = [
        str((env / "bin/python").absolute()),
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
        "--IPKernelApp.exec_lines=import google.colab",
    ]
    spec = {"argv": argv, "display_name": "colab", "language": "python"}
    (specs / "kernel.json").write_text(json.dumps(spec))
    manager = AsyncKernelManager(
        kernel_name="colab", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs.parent)])
    )
    client = NotebookClient(
        notebook, km=manager, timeout=CELL_SECONDS, resources={"metadata": {"path": str(content)}}
    )
    error = ""
    try:
        # Not client.execute(): it keeps a kernel whose manager was handed over, a GB for each
        # lesson, and after an interrupt goes on with the next.
        with client.setup_kernel(env=environment(content), cleanup_kc=True):
            for position, cell in enumerate(notebook.cells):
                client.execute_cell(cell, position)
    except (CellExecutionError, DeadKernelError, TimeoutError) as problem:
        error = strip_ansi(str(problem)).strip().splitlines()[-1]
    printed = "\n".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    return error, SKIPPED.findall(printed)


def whole(env: Path, paths: Sequence[Path], results: Path) -> int:
    """Run notebooks whole, print a line for each and keep all in a file; how many failed."""
    rows = []
    with tempfile.TemporaryDirectory() as content:
        for path in paths:
            started = time.perf_counter()
            error, skips = run_whole(env, path, Path(content))
            name = path.relative_to(ROOT).as_posix()
            rows.append({"notebook": name, "error": error, "skips": skips})
            print(f"{name}  {time.perf_counter() - started:.0f} s  {error or 'ran'}", flush=True)
            for sentence in skips:
                print(f"    {sentence.strip()}", flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return sum(bool(row["error"]) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the first argument says; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("first", "make", "whole"))
    parser.add_argument("env", nargs="?", type=Path, help="the environment's folder")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; default: all lessons")
    options = parser.parse_args(arguments)
    if not (ROOT / ".git").exists():
        print(
            "Colab clones the course, and this copy is no clone: git clone it first.",
            file=sys.stderr,
        )
        return 1
    if options.what == "first":
        found = run_first(notebooks())
        errors = {name: run["error"] for name, run in found.items() if run["error"]}
        print(
            "\n".join(f"{name}: {error}" for name, error in errors.items())
            or f"the set-up cells of {len(found)} notebooks ran"
        )
        return 1 if errors else 0
    if options.env is None:
        parser.error("name the environment's folder")
    if options.what == "make":
        print(f"Colab's versions go into {options.env}: some GB and minutes ...", flush=True)
        try:
            make(options.env)
        except subprocess.CalledProcessError:
            print(
                "They could not be installed, for the reason above. With a network, make colab begins "
                "anew.",
                file=sys.stderr,
            )
            return 1
        return 0
    chosen = [path.resolve() for path in options.paths] or notebooks(("notebooks",))
    return 1 if whole(options.env, chosen, ROOT / "build/colab.json") else 0


if __name__ == "__main__":
    sys.exit(main())
