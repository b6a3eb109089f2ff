"""Builds the course's notebooks from the scripts of `sources/`.

python tools/build.py             builds all, runs those whose code changed
python tools/build.py PATH ...    only these (a script or a notebook)
python tools/build.py --force     runs all
python tools/build.py --check     builds and runs nothing; lists what is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _folders import folder_problems, two_of_one_number  # noqa: E402

if __name__ == "__main__" and (twins := two_of_one_number(ROOT)):
    sys.exit(twins)  # with them `utils` cannot be imported

from _execute import RunError, execute  # noqa: E402
from _findings import findings, too_large  # noqa: E402
from _notebook import Target, make, targets  # noqa: E402
from _regions import SourceError  # noqa: E402
from _stored import adopt_outputs, is_current, read  # noqa: E402

from utils.files import write_whole  # noqa: E402
from utils.labs.scoreboard import ScoreboardError, read_rows, write_rows  # noqa: E402


def build(target: Target, root: Path, *, force: bool = False) -> bool:
    """Build one notebook, and run it if its code changed. True if it was run.

    Raises:
        SourceError: its script cannot be built.
        RunError: it does not run, or its outputs cannot stay; the stored one is left as it was.
    """
    notebook, path = make(target, root), root / target.path
    stored = read(path)
    must_run = target.is_executed and (force or not is_current(notebook, stored))
    if must_run:
        # Rows of this machine's own lessons are no part of the course.
        board = root / "build" / "scoreboard.json"
        _leave_out(board, path.stem.partition("_")[0])
        execute(notebook, path.parent, {"COURSE_SCOREBOARD": str(board)}, private=(str(root),))
    elif target.is_executed and stored is not None:
        adopt_outputs(notebook, stored)
    _write(notebook, path)
    return must_run


def _leave_out(board: Path, lesson: str) -> None:
    """Rows that a lesson wrote in an earlier build: it may have named them otherwise then."""
    try:
        rows = read_rows(board)
        if any(row.lesson == lesson for row in rows):
            write_rows(board, [row for row in rows if row.lesson != lesson])
    except ScoreboardError as error:
        raise RunError(str(error)) from error


def _write(notebook: nbformat.NotebookNode, path: Path) -> None:
    nbformat.validate(notebook)
    data = (nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n").encode()
    for problem in too_large(len(data)):
        raise RunError(problem)
    if not path.is_file() or path.read_bytes() != data:
        write_whole(path, data)


def build_all(chosen: Sequence[Target], root: Path, *, force: bool = False) -> list[str]:
    """Build notebooks with a progress bar; a sentence for each that failed."""
    failures = []
    with tqdm(chosen, unit="notebook") as bar:
        for target in bar:
            name = target.path.as_posix()
            bar.set_postfix_str(name)
            try:
                if build(target, root, force=force):
                    bar.write(f"ran {name}")
            except (SourceError, RunError) as error:
                failures.append(f"{name}: {error}")
    return failures


def choose(all_targets: list[Target], paths: Sequence[str], root: Path) -> list[Target]:
    """The targets that paths name, by script, notebook or folder; all of them without paths.

    Raises:
        SourceError: a path names none.
    """
    chosen = []
    for text in paths:
        path = Path(text).resolve()
        found = [t for t in all_targets if {root / t.source, root / t.path} & {path}]
        found = found or [t for t in all_targets if path in (root / t.source).parents]
        found = found or [t for t in all_targets if path in (root / t.path).parents]
        if not found:
            raise SourceError(f"{text} is no script, notebook or folder of the course.")
        chosen += [target for target in found if target not in chosen]
    return chosen or all_targets


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build or check; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="scripts, notebooks or folders; default: all")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="build nothing, list what is wrong")
    mode.add_argument("--force", action="store_true", help="run notebooks that are up to date too")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(targets(root), options.paths, root)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1
    problems = folder_problems(root, {target.source.parent for target in chosen})
    problems += (
        findings(root, chosen, leftovers=not options.paths)
        if options.check
        else build_all(chosen, root, force=options.force)
    )
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.check and not problems:
        print(f"{len(chosen)} notebooks agree with their sources")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. What was built is kept; the same command goes on from here.")
