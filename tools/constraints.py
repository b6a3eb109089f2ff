"""Writes constraints.txt: the exact versions that are installed, and so were tested.

The list is the closure of pyproject.toml's dependencies. What torch pins by itself for one
platform (CUDA libraries, Triton) is left out: those names differ between its builds, and a
machine with macOS or the CPU build has none of them.
"""

from __future__ import annotations

import platform
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CHOSEN_BY_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")


def declared(root: Path = ROOT) -> list[Requirement]:
    """The course's own requirements, with those of its set-up and its tests."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["setup"] + extras["test"]
    return [Requirement(line) for line in lines]


def children(requirement: Requirement) -> list[Requirement]:
    """What a package needs here, with the extras that were asked for."""
    needs = map(Requirement, distribution(requirement.name).requires or [])
    extras = [{"extra": extra} for extra in ("", *requirement.extras)]
    return [n for n in needs if not n.marker or any(map(n.marker.evaluate, extras))]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Name and version of every package that the requirements bring."""
    versions: dict[str, str] = {}
    seen, pending = set(), list(requirements)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        step = (name, frozenset(requirement.extras))
        if name.startswith(CHOSEN_BY_TORCH) or step in seen:
            continue
        seen.add(step)
        # Builds of torch differ in what follows the "+", and a constraint must admit each.
        versions[name] = distribution(name).version.partition("+")[0]
        pending.extend(children(requirement))
    return versions


def marker(name: str) -> str:
    """From which patch of Python 3.11 on a version holds: Debian's may be earlier; "" for all."""
    pythons = SpecifierSet(distribution(name).metadata["Requires-Python"] or "")
    patches = [
        spec.version for spec in pythons if spec.operator == ">=" and "3.11." in spec.version
    ]
    return f' ; python_full_version >= "{patches[0]}"' if patches else ""


def render(versions: dict[str, str]) -> str:
    """The text of constraints.txt."""
    head = [
        "# The exact versions that were tested. Written by `make constraints`; not edited by hand.",
        f"# Python {platform.python_version()}, {platform.system()}.",
    ]
    return (
        "\n".join(
            [*head, *(f"{name}=={versions[name]}{marker(name)}" for name in sorted(versions))]
        )
        + "\n"
    )


def main() -> None:
    """Write constraints.txt from the environment that runs this."""
    try:
        versions = closure(declared())
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed here. Run `make setup` first.") from None
    (ROOT / "constraints.txt").write_text(render(versions), encoding="utf-8", newline="\n")
    print(f"constraints.txt: {len(versions)} packages")


if __name__ == "__main__":
    main()
