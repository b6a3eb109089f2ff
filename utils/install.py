"""Sets the course up: creates .venv, installs into it, checks that it works.

Run as `python3 utils/install.py`, or `make setup`. A second call does no work; a call after an
interrupted one goes on where that one stopped. Standard library only, and in the syntax of
Python 3.6, so that a Python that is too old still says so in a sentence.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
COUNTING_SOURCE = "utils/memory/counting.cpp"
GB = 10**9
# The CUDA build unpacks to 6.4 GB. Meanwhile its 2.6 GB of downloads lie in pip's temporary
# folder and in pip's cache. The CPU build is a quarter of that.
SPACE_FOR_CUDA, SPACE_FOR_CPU, SPACE_FOR_REPAIR = 12 * GB, 3 * GB, 1 * GB
BIG_DOWNLOAD = re.compile(
    r"\s*(?:Downloading|Using cached) (\S+?)-(\d[^-]*)-\S* \((\d{3,}\.\d MB)\)"
)

# What pip's output says when it fails, and what to do then. The first that is found counts:
# without a network pip ends with "No matching distribution" too.
WAYS_OUT = [
    (
        r"No space left on device|Errno 28",
        "The disk is full. Free some space and run `make setup` again; "
        "`python3 -m pip cache purge` empties pip's own store.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "The package index was reached, but its certificate was not accepted. Behind a company "
        "proxy, set PIP_CERT to that proxy's certificate file and run `make setup` again.",
    ),
    (
        r"NewConnectionError|NameResolutionError|name resolution|Name or service not known"
        r"|nodename nor servname|ConnectTimeout|ReadTimeout|timed out|ProxyError"
        r"|Connection (?:refused|reset)|Network is unreachable",
        "The package index cannot be reached. Check the network (behind a proxy: HTTPS_PROXY) "
        "and run `make setup` again; what was downloaded is kept.",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies",
        "The versions asked for do not go together. Undo changes with `git checkout "
        "pyproject.toml constraints.txt`, or delete constraints.txt to let pip choose anew.",
    ),
    (
        r"No matching distribution found",
        "A package has no build for this Python on this machine. Try another Python: "
        "`make setup PYTHON=python3.12`.",
    ),
    (
        r"Permission denied|Errno 13",
        "This folder cannot be written to. Clone the repository into a folder of your own.",
    ),
]


class SetupError(Exception):
    """A step that failed; its text says what to do."""


def explain(pip_output: str) -> str:
    """The way out of a failed pip run."""
    for pattern, way_out in WAYS_OUT:
        if re.search(pattern, pip_output):
            return way_out
    return "pip failed; its last lines stand above. Run `make setup` again to go on."


def is_adequate(python: str) -> bool:
    """Whether a command is a Python that runs and is new enough."""
    probe = "import sys; sys.exit(sys.version_info < {})".format(OLDEST_PYTHON)
    try:
        return subprocess.call([python, "-c", probe], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def newer_python(names: Sequence[str] = NEWER_PYTHONS) -> Optional[str]:
    """The newest adequate Python on the path besides the one that runs this."""
    paths = [path for path in map(shutil.which, names) if path]
    return next((path for path in paths if is_adequate(path)), None)


def check_python(
    version: Sequence[int] = sys.version_info, modules: Sequence[str] = ("venv", "ensurepip")
) -> str:
    """Refuse a Python that is too old or cannot make environments."""
    found = ".".join(map(str, version[:2]))
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise SetupError(
            f"The course needs Python 3.11 or newer and this is {found}. Install a newer one "
            "(python.org, or your system's packages) and name it: `make setup PYTHON=python3.12`."
        )
    if not all(importlib.util.find_spec(name) for name in modules):
        raise SetupError(
            f"Python {found} came without its venv module. On Debian and Ubuntu: "
            f"`apt install python{found}-venv`; then run `make setup` again."
        )
    return found


def check_space(free: int, needed: int) -> str:
    """Refuse a disk that the installation would fill."""
    if free < needed:
        raise SetupError(
            f"{needed / GB:.0f} GB are needed here and {free / GB:.1f} GB are free. Free some "
            "space, or take PyTorch's small CPU build (3 GB): `make setup TORCH_INDEX=URL`, with "
            "the index address that pytorch.org/get-started shows for CPU."
        )
    return f"{free / GB:.0f} GB free, up to {needed / GB:.0f} GB needed"


class Setup:
    """One installation of the course into `root/.venv`."""

    def __init__(self, root: Path = ROOT, torch_index: str = "") -> None:
        self.root, self.torch_index = root, torch_index
        self.venv, self.log = root / ".venv", root / "build" / "setup.log"
        self.stamp = self.venv / "course-stamp"
        self.python = self.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def steps(self) -> List[Tuple[str, Callable[[], str]]]:
        """Name and action of each step, in order."""
        return [
            ("Python", check_python),
            ("disk space", self.space),
            (".venv", self.environment),
            ("packages", self.packages),
            ("imports", self.imports),
            ("allocator", self.allocator),
            ("extension", self.extension),
        ]

    def fingerprint(self) -> str:
        """Changes when what was asked for changes, or the Python it was installed for."""
        lists, rest = ("pyproject.toml", "constraints.txt"), (".venv/pyvenv.cfg", COUNTING_SOURCE)
        present = [self.root / name for name in lists + rest if (self.root / name).is_file()]
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in present)).hexdigest()

    def is_complete(self) -> bool:
        """Whether an earlier call has finished this very set-up."""
        done = self.stamp.is_file() and self.python.exists()
        return done and self.stamp.read_text() == self.fingerprint()

    def space(self) -> str:
        """Disk space, by the build of torch that is to come."""
        has_torch = any(folder.joinpath("torch").is_dir() for folder in self.site_packages())
        small = "cpu" in self.torch_index or not sys.platform.startswith("linux")
        needed = SPACE_FOR_REPAIR if has_torch else SPACE_FOR_CPU if small else SPACE_FOR_CUDA
        return check_space(shutil.disk_usage(str(self.root)).free, needed)

    def environment(self) -> str:
        """Keep a .venv that works; make a new one in place of one that does not."""
        pip_works = [str(self.python), "-c", "import pip"]
        runs = self.python.exists() and is_adequate(str(self.python))
        if runs and subprocess.call(pip_works) == 0:
            return "kept" + self.without_half_installed()
        command = [sys.executable, "-m", "venv", "--clear", str(self.venv)]
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if made.returncode:
            print("\n" + made.stdout.decode(errors="replace"))
            raise SetupError(f"`{' '.join(command)}` failed, for the reason above.")
        return "made"

    def site_packages(self) -> List[Path]:
        """Where packages lie; the pattern leaves out lib64, which is a link to lib."""
        unix, windows = self.venv.glob("lib/python*/site-packages"), self.venv / "Lib/site-packages"
        return list(unix) or [windows]

    def without_half_installed(self) -> str:
        """Forget packages whose installation was interrupted: pip writes INSTALLER last."""
        records = [path for folder in self.site_packages() for path in folder.glob("*.dist-info")]
        half = [path for path in records if not (path / "INSTALLER").is_file()]
        for path in half:
            shutil.rmtree(str(path))
        return f", {len(half)} half-installed packages forgotten" if half else ""

    def requirements(self) -> List[str]:
        """The one list of pyproject.toml, with the tests' tools."""
        import tomllib  # Python 3.11; by now the version is checked

        text = (self.root / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        return project["dependencies"] + project["optional-dependencies"]["test"]

    def packages(self) -> str:
        """All packages in one pip command: only so are torch and torchvision a matched pair."""
        command = [str(self.python), "-m", "pip", "install", "--progress-bar=off", "--retries=2"]
        constraints = self.root / "constraints.txt"
        command += ["-c", str(constraints)] if constraints.is_file() else []
        command += ["--extra-index-url", self.torch_index] if self.torch_index else []
        code, output = self.logged(command + self.requirements())
        if code:
            print("\n".join(last_words(output)))
            raise SetupError(f"{explain(output)} All of pip's output is in build/setup.log.")
        return "installed"

    def logged(self, command: List[str]) -> Tuple[int, str]:
        """Run pip with its output in a file; show only the large downloads."""
        self.log.parent.mkdir(exist_ok=True)
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_USER="0")
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": env}
        with self.log.open("wb") as log, subprocess.Popen(command, **pipe) as process:
            print("some minutes the first time; pip's output goes to build/setup.log", flush=True)
            for line in process.stdout:
                log.write(line)
                show(line.decode(errors="replace"))
        return process.returncode, self.log.read_bytes().decode(errors="replace")

    def imports(self) -> str:
        """Import what needs its parts to fit together."""
        probe = "import torch, torchvision, jupyterlab as _; print(torch.__version__)"
        done = subprocess.run([str(self.python), "-c", probe], stdout=subprocess.PIPE)
        if done.returncode:
            raise SetupError(
                "The packages do not work together. Delete .venv and run `make setup` again."
            )
        return f"torch {done.stdout.decode().strip()} and torchvision work together"

    def allocator(self) -> str:
        """Build the counting allocator; without a compiler this says what is used instead."""
        # Not `-m`: importing the package would import the module before it runs.
        build = "from utils.memory.compile import main; main()"
        done = subprocess.run([str(self.python), "-c", build], cwd=str(self.root))
        if done.returncode:
            raise SetupError("The counting allocator could not be built, for the reason above.")
        return "ready"

    def extension(self) -> str:
        """Build what ZeRO needs on a CPU; a failure is said, and is none of the set-up's."""
        build = "from utils.techniques.deepspeed import main; main()"
        done = subprocess.run([str(self.python), "-c", build], cwd=str(self.root))
        return "not built: lesson 09 says what it skips" if done.returncode else "ready"

    def run(self) -> None:
        """Do every step, then leave the stamp that lets the next call do nothing."""
        if self.stamp.is_file():
            self.stamp.unlink()
        steps = self.steps()
        for number, (name, action) in enumerate(steps, start=1):
            print(f"[{number}/{len(steps)}] {name}: ", end="", flush=True)
            started = time.perf_counter()
            try:
                note = action()
            except SetupError as error:
                raise SetupError(f"Set-up stopped at step {number}, {name}. {error}") from None
            print(f"{note} ({time.perf_counter() - started:.1f} s)", flush=True)
        self.stamp.write_text(self.fingerprint())


def last_words(output: str) -> List[str]:
    """The end of pip's output as a person can read it: no warnings, no line over 160 letters."""
    lines = [line for line in output.splitlines() if line and not line.startswith("WARNING")]
    return [line[:160] for line in lines[-5:]]


def show(line: str) -> None:
    """Print a line of pip's output if it stands for minutes of waiting."""
    large = BIG_DOWNLOAD.match(line)
    if large:
        print(f"      fetching {large[1]} {large[2]}, {large[3]}", flush=True)
    elif line.startswith("Installing collected packages"):
        print(f"      installing {line.count(',') + 1} packages", flush=True)


def main() -> int:
    """Set up if needed; 0 when the course is ready."""
    if sys.version_info < OLDEST_PYTHON:
        better = newer_python()
        if better:
            os.execv(better, [better, __file__])
    setup = Setup(torch_index=os.environ.get("TORCH_INDEX", ""))
    try:
        if setup.is_complete():
            print("Set-up is complete. (Another Python or build of torch: delete .venv first.)")
        else:
            setup.run()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. `make setup` goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
