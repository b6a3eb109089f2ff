"""One installation of the course, step by step."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from utils.installation.environment import Environment
from utils.installation.packages import Packages
from utils.installation.programs import alone, output_of, start
from utils.installation.torch_build import TorchBuild, choose
from utils.installation.ways_out import SetupError, explain, show_end

GB = 10**9
# Unpacked, with CUDA's libraries and without. uv unpacks while it downloads, and links from its
# store into .venv where both lie on one disk.
SPACE_FOR_CUDA, SPACE_FOR_CPU, SPACE_FOR_REPAIR = 7 * GB, 2 * GB, 1 * GB
NO_SPACE = "{:.0f} GB are needed here and {:.1f} GB are free. Free some space"
TAKE_SMALL = (
    ", or take PyTorch's small CPU build (2 GB): `make setup TORCH_INDEX=URL`, with the index "
    "address that pytorch.org/get-started shows for CPU."
)
ASKED_FOR = ("pyproject.toml", "constraints.txt", "utils/memory/counting.cpp")
COURSE = ("-r", "pyproject.toml", "--extra", "test")
IMPORTS = "import torch, torchvision, jupyterlab.labapp; print('torch', torch.__version__)"
APART = "The packages do not work together. Delete .venv and run `make setup` again."
ALLOCATOR = "from utils.memory.source import prepare; print(prepare())"
NO_ALLOCATOR = "The counting allocator could not be built, for the reason above."
EXTENSION = "from utils.techniques.deepspeed import main; main()"


class Installation:
    """One installation of the course into `root/.venv`; torch from the learner's index, if any."""

    def __init__(self, root: Path, torch_index: str = "") -> None:
        self.root, self.torch_index = root, torch_index
        self.venv = Environment(root / ".venv")
        self.packages = Packages(root, str(self.venv.python))
        self.build = TorchBuild("", False)
        self.mark = self.venv.folder / "course-stamp"

    def steps(self) -> dict[str, Callable[[], str]]:
        """The action of each step by its name, in order; it returns what was done."""
        return {
            ".venv": self.venv.make,
            "uv": self.uv,
            "PyTorch": self.torch,
            "disk space": self.space,
            "packages": self.all_packages,
            "imports": lambda: self.course(IMPORTS, APART) + " and torchvision work together",
            "allocator": lambda: self.course(ALLOCATOR, NO_ALLOCATOR),
            "extension": self.extension,
        }

    def uv(self) -> str:
        """What installs the rest."""
        self.packages.install_by_pip("uv")
        return self.venv.installed("uv")

    def torch(self) -> str:
        """Choose the build, unless the wanted one is there."""
        present = self.venv.installed("torch")
        is_wanted = self.packages.pinned("torch") == f"torch=={present.partition('+')[0]}"
        if is_wanted and not self.torch_index:
            return f"kept: {present} is installed"
        self.build = choose(self.packages, self.torch_index)
        return self.build.reason

    def space(self) -> str:
        """Refuse a disk, that of .venv or of uv's store of downloads, which this would fill."""
        needed = SPACE_FOR_CPU if self.build.small else SPACE_FOR_CUDA
        needed = SPACE_FOR_REPAIR if self.venv.installed("torch") else needed
        store = output_of([str(self.venv.python), "-m", "uv", "cache", "dir"], self.root)[1].strip()
        places = [self.root, next(path for path in Path(store, "x").parents if path.exists())]
        free = min(shutil.disk_usage(place).free for place in places)
        if free < needed:
            way_out = TAKE_SMALL if needed == SPACE_FOR_CUDA else " and run `make setup` again."
            raise SetupError(NO_SPACE.format(needed / GB, free / GB) + way_out)
        return f"{free / GB:.0f} GB free, up to {needed / GB:.0f} GB needed"

    def all_packages(self) -> str:
        """All in one command: only so are torch and torchvision a matched pair."""
        small = ["--extra", "small"] if self.build.index_url else []
        self.packages.install(*COURSE, *small, torch_index=self.torch_index)
        self.compiler = start([str(self.venv.python), "-c", EXTENSION], self.root)
        return "all in place"

    def course(self, code: str, problem: str) -> str:
        """What a line of Python prints in .venv; if it fails, the problem is a SetupError."""
        status, output = output_of([str(self.venv.python), "-c", code], self.root)
        if status:
            show_end(output)
            raise SetupError(problem)
        return output.strip()

    def extension(self) -> str:
        """Wait for what ZeRO needs on a CPU, in the making since the packages are there.

        A failure is said, and is none of the set-up's.
        """
        output, _ = self.compiler.communicate()
        said = f"not built, and lesson 09 skips what needs it. {output.strip()}"
        return said if self.compiler.returncode else "ready"

    def run(self) -> None:
        """Do every step, then leave the mark that lets the next call do nothing.

        Raises:
            SetupError: a step failed; the sentence names it and says what to do.
        """
        self.packages.log.unlink(missing_ok=True)
        steps = self.steps()
        for number, (name, action) in enumerate(steps.items(), start=1):
            print(f"[{number}/{len(steps)}] {name}: ", end="", flush=True)
            begun = time.perf_counter()
            try:
                note = action()
            except (SetupError, OSError) as error:
                reason = explain(error) if isinstance(error, OSError) else error
                raise SetupError(f"Set-up stopped at step {number}, {name}. {reason}") from error
            print(f"{note} ({time.perf_counter() - begun:.1f} s)", flush=True)
        self.leave_mark()

    def leave_mark(self) -> None:
        """Leave the mark, whole or not at all."""
        part = self.mark.with_name(f"{self.mark.name}.part")
        try:
            part.write_text(" ".join([self.fingerprint(), *self.venv.modules()]), encoding="utf-8")
            part.replace(self.mark)
        finally:
            part.unlink(missing_ok=True)

    def fingerprint(self) -> str:
        """Changes with what was asked for, the Python it was installed for, and the folder."""
        present = [self.root / name for name in ASKED_FOR if (self.root / name).is_file()]
        lines = [str(self.venv.folder.resolve()), self.venv.version()]
        parts = [*map(str.encode, lines), *(path.read_bytes() for path in present)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def is_done(self) -> bool:
        """Whether a call finished this very set-up, and all that could be imported then still can.

        A mark that cannot be read is none. Packages that the learner added are none of its concern.
        """
        try:
            mark, *modules = self.mark.read_text(encoding="utf-8").split() or [""]
        except (OSError, UnicodeDecodeError):
            return False
        return mark == self.fingerprint() and self.venv.modules().issuperset(modules)


def install(root: Path) -> int:
    """Set up if needed, never beside another call; 0 when the course is ready."""
    setup = Installation(root, os.environ.get("TORCH_INDEX", ""))
    try:
        if not setup.is_done():
            with alone(root / "build" / "setup.lock", say_waiting):
                if not setup.is_done():  # another call may have done it meanwhile
                    setup.run()
                    return 0
        print("Set-up is complete. (Another Python or build of torch: delete .venv first.)")
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nSet-up stopped. {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. `make setup` goes on from here.", file=sys.stderr)
        return 130
    return 0


def say_waiting() -> None:
    """Say why nothing happens."""
    print("Another set-up is at work in this folder; this one waits for it to end.", flush=True)
