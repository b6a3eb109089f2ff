"""All packages into .venv: uv by pip, the rest by uv, their words kept in build/setup.log.

uv reads none of pip's settings, and a machine may need them: they are said again in uv's words, in
its environment, since other users can read a program's arguments and an address may hold a password.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from utils.installation.programs import output_of, start
from utils.installation.ways_out import SetupError, explain, show_end

# What stands for minutes of waiting: a large download, and the end of all.
TELLING = re.compile(
    r"(?P<large>Downloading \S+ \((?:\d{3,}\.\d ?M|[\d.]+ ?G)iB\))|Installed \d+ packages?"
)
PIP = (
    "-m",
    "pip",
    "install",
    "--progress-bar=off",
    "--no-input",
    "--retries=2",
    "--no-user",
    "--disable-pip-version-check",
)
UV_SETTINGS = {
    "NO_COLOR": "1",
    "UV_NO_PROGRESS": "1",
    "UV_NO_WRAP": "1",  # a reason is one line
    "UV_HTTP_RETRIES": "2",
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # indexes count alike, as they do for pip
}
UVS_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "HTTPS_PROXY HTTP_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}


class Packages:
    """What a repository asks for, installed for one interpreter."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python, self.log = root, python, root / "build" / "setup.log"
        self.constraints = root / "constraints.txt"

    def pinned(self, name: str) -> str:
        """A requirement of the version that was tried, "uv==0.9.1", where that is known."""
        text = self.constraints.read_text(encoding="utf-8") if self.constraints.is_file() else ""
        return next((line for line in text.splitlines() if line.startswith(f"{name}==")), name)

    def install_by_pip(self, name: str, *options: str) -> None:
        """uv in the version that was tried, and at once a sign of whether an index answers.

        Raises:
            SetupError: pip failed.
        """
        # Pinned in the requirement: pip calls a constraint that no index can meet a conflict.
        self.run([*PIP, *options, self.pinned(name)], os.environ)

    def install(self, *wanted: str, torch_index: str = "") -> None:
        """Install requirements by uv, with pip's settings and the versions that were tried.

        Raises:
            SetupError: uv failed.
        """
        self.run([*self.uv(), *wanted], self.environment(torch_index))

    def uv(self) -> list[str]:
        """The command `uv pip install` as a module of the interpreter."""
        tried = ["-c", str(self.constraints)] if self.constraints.is_file() else []
        options = [*tried, *["--no-index"] * self.asks_no_index]
        return ["-m", "uv", "pip", "install", "--python", self.python, *options]

    def run(self, arguments: Iterable[str], environment: Mapping[str, str]) -> None:
        """Run a module of the interpreter; show only what stands for minutes of waiting.

        Raises:
            SetupError: it failed.
            OSError: the log cannot be written.
        """
        self.log.parent.mkdir(exist_ok=True)
        output, command = "", [self.python, *arguments]
        with self.log.open("a", encoding="utf-8") as log:
            with start(command, self.root, environment) as process:
                for line in process.stdout or ():
                    output += line
                    log.write(line)
                    show(line)
        if process.returncode:
            show_end(output)
            raise SetupError(f"{explain(output)} All of its output is in build/setup.log.")

    def why_not(self, index: str, names: Iterable[str], seconds: float) -> str:
        """ "" if an index has packages for this machine; else why it cannot be used."""
        command = [self.python, *self.uv(), "--dry-run", "--no-deps", "--reinstall", *names]
        only = {"UV_DEFAULT_INDEX": index, "UV_INDEX": "", "UV_FIND_LINKS": ""}
        status, output = output_of(command, self.root, self.environment() | only, seconds)
        reason = output.strip().rpartition("\n")[2].strip().removeprefix("cause: ")
        return f"{index}: {reason}" if status else ""

    @cached_property
    def settings(self) -> dict[str, str]:
        """pip's settings that count for `pip install`, its files and variables in their order."""
        _, listed = output_of([self.python, "-m", "pip", "config", "list"], self.root)
        found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(['\"].*)$", listed, re.MULTILINE)
        found.sort(key=lambda row: ("global", "install", ":env:").index(row[0]))
        return {name: ast.literal_eval(value) for _, name, value in found}

    @property
    def asks_no_index(self) -> bool:
        """Whether pip is to take all packages from folders; uv has no variable for it."""
        return self.settings.get("no-index", "").lower() in ("1", "true", "yes", "on")

    def environment(self, torch_index: str = "") -> dict[str, str]:
        """The variables for uv: pip's settings, and the learner's own for uv before them."""
        own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
        words = {**os.environ, **UV_SETTINGS, **in_uvs_words(self.settings), **own}
        if torch_index:  # for all, as its builds may need what only it has, such as ROCm's triton
            words["UV_INDEX"] = f"{words.get('UV_INDEX', '')} torch={torch_index}".strip()
        return words


def in_uvs_words(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's environment variables for pip's settings."""
    words = {}
    for name in settings.keys() & UVS_NAMES:
        value = " ".join(settings[name].split())
        if name == "find-links":  # a folder that is not there is skipped by pip, and ends uv
            value = ",".join(filter(is_there, value.split()))
        elif name.endswith("timeout"):
            value = str(round(float(value)))
        words |= dict.fromkeys(UVS_NAMES[name].split() if value else (), value)
    return words


def is_there(place: str) -> bool:
    """Whether a place of wheels is an address or a folder that exists."""
    return place.startswith("http") or Path(place.removeprefix("file://")).expanduser().exists()


def show(line: str) -> None:
    """Print a line of an installer's output if it stands for minutes of waiting."""
    if told := TELLING.match(line.strip()):
        print(f"\n      {told[0]}", end="" if told["large"] else ": ", flush=True)
