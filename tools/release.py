"""Puts a release together: `make release` packs site, wheelhouse and notebooks into build/release.

Run `make site` and `make wheelhouse` first; the make target does. The notes are the changelog's
newest part.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "big-models-small-memory"
COURSE = "build/wheelhouse/course"  # the course's own files, without what was put beside them
PARTS = {
    "site": ("build/site",),
    "wheelhouse": ("build/wheelhouse",),
    "notebooks": (f"{COURSE}/notebooks", f"{COURSE}/labs", f"{COURSE}/solutions"),
}


def notes(changelog: str) -> str:
    """The newest part of a changelog."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)
    return f"## {parts[1].strip()}\n" if len(parts) > 1 else changelog


def pack(root: Path, folder: Path) -> list[Path]:
    """Write an archive of each part.

    Raises:
        FileNotFoundError: a part was not built; the text says by which command.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = []
    for part, sources in PARTS.items():
        for source in sources:
            if not (root / source).is_dir():
                command = source.split("/")[1]
                raise FileNotFoundError(f"{source} is not there; run make {command} first.")
        made.append(folder / f"{NAME}-{part}.tar.gz")
        with tarfile.open(made[-1], "w:gz", compresslevel=6) as archive:
            for source in sources:
                archive.add(root / source, f"{NAME}-{part}/{Path(source).name}", filter=_plain)
    return made


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A file as anyone may unpack it, without editors' leavings."""
    if ".ipynb_checkpoints" in entry.name:
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def main(root: Path = ROOT) -> int:
    """Pack all parts and write the notes; 0 if all is there."""
    folder = root / "build/release"
    try:
        made = pack(root, folder)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    (folder / "notes.md").write_text(
        notes((root / "CHANGELOG.md").read_text(encoding="utf-8")), encoding="utf-8"
    )
    for path in made:
        print(f"{path.relative_to(root)}  {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
