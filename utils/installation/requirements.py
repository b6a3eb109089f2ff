"""What is to be installed, in the form that uv reads: one list, and where torch comes from."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from utils.installation.torch_build import PAIR


def wanted(root: Path) -> list[str]:
    """The one list of pyproject.toml, with the tests' tools."""
    project = _project(root)
    return project["dependencies"] + project["optional-dependencies"]["test"]


def installer(root: Path) -> list[str]:
    """What installs the rest, in the version that was tried, where that is known.

    The version stands in the requirement, since pip calls a constraint that no index can meet a
    conflict, also where the index has no such package at all.
    """
    fixed = fixed_versions(root)
    needs = _project(root)["optional-dependencies"]["setup"]
    names = [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs]
    return [
        f"{n}=={fixed[n]}" if n in fixed else need for n, need in zip(names, needs, strict=True)
    ]


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def fixed_versions(root: Path) -> dict[str, str]:
    """Name and version of each line of constraints.txt; empty without that file."""
    path = root / "constraints.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def write_for_uv(file: Path, needs: list[str], torch_index: str) -> None:
    """Write a project that needs these packages, torch and torchvision from their own index.

    An "explicit" index gives what names it and nothing else: what torch needs in its turn comes
    from where all other packages come from.

    Raises:
        OSError: it cannot be written.
    """
    # A JSON string of printable letters is a TOML string too.
    lines = ["[project]", 'name = "course"', 'version = "0"', f"dependencies = {json.dumps(needs)}"]
    if torch_index:
        lines += ["[tool.uv.sources]", *(f'{name} = {{ index = "torch" }}' for name in PAIR)]
        lines += [
            "[[tool.uv.index]]",
            'name = "torch"',
            f"url = {json.dumps(torch_index)}",
            "explicit = true",
        ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
