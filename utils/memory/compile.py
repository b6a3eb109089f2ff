"""Build the counting allocator once and keep it: `python -m utils.memory`.

One call of the C++ compiler, about two seconds; the result is cached per torch version.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("counting.cpp")
COMPILE_TIMEOUT_SECONDS = 180


class CompilerError(RuntimeError):
    """The counting allocator cannot be built here. The message is one sentence."""


def find_compiler() -> str:
    """Return the C++ compiler's path.

    Raises:
        CompilerError: there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CompilerError(
        "No C++ compiler was found (looked for $CXX, c++, g++, clang++); install one, "
        "for example with 'apt install g++' or 'xcode-select --install'."
    )


def cache_folder() -> Path:
    """The first of the usual cache places that this user alone can write.

    What lies there is loaded as code, so it must not come from anyone else. The folder is this
    user's, with mode 700; one in the shared temporary folder also carries the user's number.

    Raises:
        CompilerError: there is none.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    shared = Path(tempfile.gettempdir()) / f"big-models-small-memory-{_user()}"
    for folder in (Path(base) / "big-models-small-memory", shared):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder):
                return folder
        except OSError:
            continue
    raise CompilerError(
        "No folder for the compiled allocator is yours alone and can be written; set "
        "XDG_CACHE_HOME to a folder of your own."
    )


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's own and can be made, or is, closed to all others.

    Raises:
        OSError: it cannot be looked at.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        return False
    folder.chmod(0o700)
    return os.access(folder, os.W_OK)


def _is_own(found: os.stat_result) -> bool:
    return os.name == "nt" or found.st_uid == os.geteuid()  # Windows has no such number


def _user() -> str:
    return "user" if os.name == "nt" else str(os.geteuid())


def library_path() -> Path:
    """Where the library for this torch, this source and this machine belongs."""
    import torch

    key = f"{torch.__version__} {platform.system()} {platform.machine()}".encode()
    digest = hashlib.sha256(key + SOURCE.read_bytes()).hexdigest()[:16]
    return cache_folder() / f"counting-{digest}.so"


def compile_library() -> Path:
    """Return the compiled library, building it unless it is there.

    Raises:
        CompilerError: no compiler, no writable folder, or the compiler failed.
    """
    target = library_path()
    if not _is_trusted(target):
        _build(find_compiler(), target)
    return target


def _is_trusted(library: Path) -> bool:
    """Whether it is there, a file of this user, and no one else could have written into it."""
    try:
        found = library.lstat()
    except FileNotFoundError:
        return False
    closed = os.name == "nt" or not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and _is_own(found) and closed


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        try:
            done = subprocess.run(
                _command(compiler, output),
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{compiler} could not build the allocator: {error}.") from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise CompilerError(f"{compiler} could not build the allocator: {lines[0]}")
        output.chmod(0o700)
        os.replace(output, target)  # atomic: a second process never loads half a file


def _command(compiler: str, output: Path) -> list[str]:
    import torch

    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        compiler, "-O2", "-std=c++20", "-fPIC", "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{root / 'include'}", str(SOURCE), "-o", str(output),
        f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip
