"""Tries the course in the states in which its users have it: a stage of `make soak`.

python tools/fresh.py                      every state
python tools/fresh.py "no compiler" ...    only these

In each state a copy of the last commit, with a home of its own, is set up, and lesson 01 and style
run in it. A line says how that went: "green", or "told" with the sentence that a user reads there,
or "FAILED". A state that this machine cannot make is "not tried". Whole outputs go to build/fresh/.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import wheelhouse  # noqa: E402

from utils.install import OLDEST_PYTHON  # noqa: E402

LESSON = "notebooks/beginner/01_where_memory_goes.ipynb"
PYTHON = ".venv/bin/python"
NBVAL = ("--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300")
STEP_SECONDS = 900  # of each of the three
COMPILERS = ("c++*", "g++*", "gcc*", "clang*", "cc", "*-linux-gnu-g++*", "*-linux-gnu-gcc*")
# A user's terminal has none of what a stage of make sets; what leads to the network stays.
KEPT = re.compile(
    r"(PIP|UV|SSL|LC)_|(LANG|TZ|TMPDIR|CUDA_VISIBLE_DEVICES)$"
    r"|(?i:(https?|all|no)_proxy)$|\w+_CA_BUNDLE$"
)
PREFIX = "course-fresh-"
SMALL_DISK_BYTES = 2_050_000_000  # 2 GB beside the course itself

# What furnishes a namespace; "$1" is a state's folder.
# Root writes whatever the modes say: for root, home is a file system that is read-only.
READ_ONLY_HOME = ("--mount", 'mount -t tmpfs -o ro,size=4k none "$1/home"')
SMALL_DISK = ("--mount", f'mount -t tmpfs -o size={SMALL_DISK_BYTES} none "$1/disk"')
NO_NETWORK = ("--net", "ip link set lo up")


@dataclass(frozen=True)
class State:
    """One state of a machine, and what of it a user can be told instead of a green run.

    Attributes:
        name: As the table shows it.
        python: The interpreter that sets up.
        folder: Name of the course's folder.
        has_git: Whether it is a clone; else what an archive unpacks to.
        without: Patterns of programs that are not on the path.
        inside: The namespace that it runs in: unshare's option, and the shell's line that
            furnishes it. None for none.
        home_mode: Mode of the home folder.
        offline: Whether lesson and style run without a network.
        told: Pattern of a sentence that may end it.
        lacking: Why this machine cannot make the state; "" if it can.
    """

    name: str
    python: Path
    folder: str = "course"
    has_git: bool = True
    without: tuple[str, ...] = ()
    inside: tuple[str, str] | None = None
    home_mode: int = 0o700
    offline: bool = False
    told: str = "(?!)"
    lacking: str = ""


@dataclass
class Tried:
    """What came of a state: seconds of each step that ran, and the sentence that ended it."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    sentence: str = ""


def interpreters() -> dict[tuple[int, int], Path]:
    """The Pythons of this machine that are new enough, by version; pyenv's first."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    path = os.pathsep.join([*map(str, versions.glob("*/bin")), os.environ["PATH"]])
    command = [
        sys.executable,
        "-m",
        "uv",
        "python",
        "list",
        "--only-installed",
        "--all-versions",
        "--output-format",
        "json",
    ]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    found: dict[tuple[int, int], Path] = {}
    for entry in json.loads(done.stdout or "[]"):
        version = (entry["version_parts"]["major"], entry["version_parts"]["minor"])
        is_plain = entry["implementation"] == "cpython" and entry["variant"] == "default"
        if is_plain and version >= OLDEST_PYTHON and "shims" not in Path(entry["path"]).parts:
            found.setdefault(version, Path(entry["path"]))
    return found


def states() -> list[State]:
    """Every state, also those that this machine cannot make."""
    own, here = Path(sys.base_prefix, "bin/python3"), sys.version_info[:2]
    no_room = r"\d GB are needed here and 2\.\d GB are free"
    made = [
        State(f"clean clone, Python {'.'.join(map(str, here))}", own),
        State("archive, no git", own, has_git=False, without=("git",)),
        State("path with a space", own, folder="a course"),
        State("no make", own, without=("make", "gmake")),
        State("no compiler", own, without=COMPILERS),
        State("no network after set-up", own, offline=True, lacking=cannot(NO_NETWORK)),
        unwritable_home(own),
        State(
            "2 GB of disk left", own, inside=SMALL_DISK, told=no_room, lacking=cannot(SMALL_DISK)
        ),
    ]
    found = interpreters()
    others = {OLDEST_PYTHON, max(found, default=here)} - {here}
    return made + [with_python(version, found.get(version)) for version in sorted(others)]


def with_python(version: tuple[int, int], python: Path | None) -> State:
    """The state of another Python, which may have no builds of the packages."""
    text = ".".join(map(str, version))
    lacking = "" if python else f"it is not on this machine; uv python install {text} fetches it"
    told = "no build for this Python|have none for this Python"
    return State(f"Python {text}", python or Path(), told=told, lacking=lacking)


def unwritable_home(python: Path) -> State:
    """Home as on a locked account."""
    inside = READ_ONLY_HOME if os.name == "posix" and os.geteuid() == 0 else None
    return State(
        "home not writable", python, inside=inside, home_mode=0o500, lacking=cannot(inside)
    )


def entering(space: tuple[str, str] | None, folder: Path) -> list[str]:
    """The words before a command that runs in a namespace of its own."""
    if space is None:
        return []
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    line = f'set -e; {space[1]}; shift; exec "$@"'
    return ["unshare", *as_root, space[0], "sh", "-c", line, "sh", str(folder)]


def cannot(space: tuple[str, str] | None) -> str:
    """Why this machine cannot make such a namespace; "" if it can."""
    if space is None:
        return ""
    if shutil.which("unshare") is None:
        return "it needs Linux with unshare"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("home", "disk"):
            Path(folder, name).mkdir()
        command = [*entering(space, Path(folder)), "true"]
        done = subprocess.run(command, capture_output=True, text=True)
    return f"this system refuses: {done.stderr.strip()}" if done.returncode else ""


def set_up_command(root: Path = ROOT) -> list[str]:
    """The command of CONTRIBUTING.md that sets up without make.

    Raises:
        ValueError: that page has none, or several.
    """
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = text.partition("## Without make")[2].partition("\n## ")[0].split("```")[1::2]
    lines = [line for block in blocks for line in block.splitlines() if "install.py" in line]
    if len(lines) != 1:
        raise ValueError(f"CONTRIBUTING.md names {len(lines)} commands of install.py, and not one")
    return shlex.split(lines[0])


def steps(state: State) -> dict[str, list[str]]:
    """Name and command of each step, as this state's user would type them."""
    has_make = "make" not in state.without
    return {
        "set-up": ["make", "setup"] if has_make else set_up_command(),
        "lesson 01": [PYTHON, "-m", "pytest", *NBVAL, LESSON],
        "style": ["make", "style"] if has_make else [PYTHON, "tools/style.py"],
    }


def put_course(state: State, target: Path) -> None:
    """The last commit as this state's user has it; without git here, this folder's own files.

    Raises:
        subprocess.CalledProcessError: git failed.
    """
    if not (ROOT / ".git").exists():
        wheelhouse.copy_course(ROOT, target)
        return
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
    if not state.has_git:
        shutil.rmtree(target / ".git")


def put_programs(state: State, folder: Path) -> None:
    """Links to what is on the path, but for what this state is without; its Python comes first."""
    folder.mkdir()
    (folder / "python3").symlink_to(state.python)
    for place in os.get_exec_path():
        for program in sorted(Path(place).glob("*")):
            link = folder / program.name
            hidden = any(fnmatch.fnmatch(program.name, pattern) for pattern in state.without)
            if not hidden and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program)


def variables(folder: Path) -> dict[str, str]:
    """A user's environment: nothing of this process but language and what leads to the network."""
    kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    own = [Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"]
    if found := next((file for file in own if file.is_file()), None):
        kept.setdefault("PIP_CONFIG_FILE", str(found))
    return kept | {
        "PATH": str(folder / "programs"),
        "HOME": str(folder / "home"),
        "UV_CACHE_DIR": str(store()),
    }


def try_in(state: State, folder: Path, log: Path) -> Tried:
    """Run a state's steps in a folder that has `home` and `disk`; the first that fails ends it."""
    course, tried = folder / "disk" / state.folder, Tried()
    put_course(state, course)
    put_programs(state, folder / "programs")
    environment = variables(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as whole:
        for name, command in steps(state).items():
            offline = state.offline and name != "set-up"
            words = [*entering(NO_NETWORK if offline else None, folder), *command]
            started = time.perf_counter()
            status, output = run(course, words, environment)
            tried.seconds[name] = round(time.perf_counter() - started, 1)
            whole.write(f"$ {shlex.join(words)}\n{output}\n[{status}]\n\n")
            whole.flush()
            if status:
                tried.failed, tried.sentence = name, last_sentence(output)
                break
    return tried


def run(
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    seconds: float = STEP_SECONDS,
) -> tuple[int, str]:
    """Status and output of a command; it ends with all that it started when its time is over."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            return 127, f"It could not be started: {error}."
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124, f"It did not end within {seconds:g} s."
        finally:
            end(process)
        output.seek(0)
        return status, output.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program's session; this script, which may be in it, ends those that it started."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, word)
            process.wait(10)


def store() -> Path:
    """The folder in which uv keeps what it downloaded."""
    command = [sys.executable, "-m", "uv", "cache", "dir"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def last_sentence(output: str) -> str:
    """What a user reads last, without what make says of it."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("make")), "")


@contextmanager
def room(state: State, parent: Path) -> Iterator[Path]:
    """A folder for a state, removed at the end; what a run that was killed left there goes first."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(PREFIX).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    mine = f"{PREFIX}{os.getpid()}-"  # what the killed still write meanwhile goes with the next run
    with tempfile.TemporaryDirectory(prefix=mine, dir=parent, ignore_cleanup_errors=True) as made:
        for name in ("home", "disk"):
            Path(made, name).mkdir()
        Path(made, "home").chmod(state.home_mode)
        yield Path(made)


def try_state(state: State, parent: Path) -> Tried:
    """Try a state in a process of its own, inside its namespace."""
    with room(state, parent) as folder:
        command = [
            *entering(state.inside, folder),
            sys.executable,
            str(Path(__file__).resolve()),
            "--inside",
            str(folder),
            state.name,
        ]
        status, output = run(ROOT, command, seconds=4 * STEP_SECONDS)
    if status:
        return Tried(failed="the trial itself", sentence=last_sentence(output))
    return Tried(**json.loads(output.splitlines()[-1]))


def verdict(state: State, tried: Tried) -> tuple[str, str]:
    """A word on a state, and the rest of its line."""
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in tried.seconds.items())
    if not tried.failed:
        return "green", took
    word = "told" if re.search(state.told, tried.sentence) else "FAILED"
    return word, f"{took}; {tried.failed} ended with: {tried.sentence}"


def log_of(state: State) -> Path:
    """Where the whole output of a state goes."""
    return ROOT / "build/fresh" / f"{re.sub('[^a-z0-9.]+', '-', state.name.lower())}.log"


def try_all(chosen: Sequence[State], parent: Path) -> int:
    """Try states one after the other and print a line for each; the number that failed."""
    failed = 0
    for state in chosen:
        word, rest = "not tried", state.lacking
        if not state.lacking:
            word, rest = verdict(state, try_state(state, parent))
        if word == "FAILED":
            failed, rest = failed + 1, f"{rest} (all of it: {log_of(state).relative_to(ROOT)})"
        print(f"{word:<10} {state.name:<24} {rest}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all states, or those that are named; 0 if each was green or told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="states; default: all")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # this script calls itself
    options = parser.parse_args(arguments)
    everything = {state.name: state for state in states()}
    if unknown := [name for name in options.names if name not in everything]:
        known = "; ".join(everything)
        print(f"There is no state {unknown[0]!r}; there are: {known}.", file=sys.stderr)
        return 1
    chosen = [everything[name] for name in options.names or everything]
    if options.inside:
        print(json.dumps(asdict(try_in(chosen[0], options.inside, log_of(chosen[0])))))
        return 0
    try:  # on the disk of uv's store, so that packages are links
        return 1 if try_all(chosen, store().parent) else 0
    except KeyboardInterrupt:
        print("\nInterrupted; what was running has ended.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended so, it ends what it started
    sys.exit(main())
