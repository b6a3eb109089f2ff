"""`python -m utils.labs`: copies the labs into my_labs/, where they are worked on."""

from __future__ import annotations

from pathlib import Path

from utils.labs.copy import copy_labs

ROOT = Path(__file__).resolve().parents[2]


def main(root: Path = ROOT) -> int:
    """Copy, and say what was copied and what was kept; 1 if it cannot be done."""
    try:
        done = copy_labs(root / "labs", root / "my_labs")
    except FileNotFoundError as error:
        print(error)
        return 1
    except OSError as error:
        print(
            f"my_labs cannot be written to ({error.strerror}). Use a copy of the course "
            "in a folder of your own."
        )
        return 1
    for lab in done.copied:
        print(f"copied  my_labs/{lab.as_posix()}")
    for lab in done.kept:
        print(f"kept    my_labs/{lab.as_posix()} (yours; to start afresh, rename it first)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
