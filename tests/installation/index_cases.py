"""A package index on this machine, with packages that hold nothing but their version."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MAIN = "import sys\ndef main(): print(sys.prefix, *sys.argv[1:])\n"


def add_wheel(
    index: Path,
    name: str,
    version: str,
    needs: Sequence[str] = (),
    tag: str = "py3-none-any",
    script: str = "",
) -> None:
    """Write a wheel into `index/name/`, as that package's page lists it.

    A `script`, "tool = tool:main", prints where its Python lies and what it was given.
    """
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n{MAIN if script else ''}",
        f"{info}/METADATA": head + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script}\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    links = (f'<a href="{w.name.replace("+", "%2B")}">{w.name}</a>' for w in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on 127.0.0.1; yields its address."""
    handler = partial(_Quiet, directory=str(folder))
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}"
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
