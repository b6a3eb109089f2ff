"""One file by HTTP: resumed where it stopped, checked, and under its name only when whole."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tqdm import tqdm

from utils.checked import short
from utils.units import format_bytes

MOST_SECONDS = 86_400
CHUNK_BYTES = 2**18
NETWORK_ERRORS = (OSError, HTTPException)


class DownloadError(RuntimeError):
    """The file did not arrive; the message says why, as part of a sentence."""


def download(
    url: str, path: Path, md5: str, *, connect_seconds: float = 3.0, stall_seconds: float = 10.0
) -> None:
    """Fetch `url` into `path`, going on from `path` + ".part" where an earlier call stopped.

    Args:
        url: Address of the file.
        path: Its final place; nothing stands there until the checksum is right.
        md5: Checksum of the whole file, hexadecimal.
        connect_seconds: Give up when no answer has begun by then: being offline must be quick.
        stall_seconds: Give up when nothing comes for that long.

    Raises:
        DownloadError: no answer, an interrupted transfer (its part is kept), or a wrong file.
        OSError: the folder cannot be written.
        ValueError: no address of a web page, or seconds that no one waits.
    """
    if urlsplit(url).scheme not in ("http", "https", "file"):
        raise ValueError(f"url is {short(url)}; an address begins with https:// or http://.")
    for name, seconds in (("connect_seconds", connect_seconds), ("stall_seconds", stall_seconds)):
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(f"{name} is {seconds}; write seconds above 0, up to {MOST_SECONDS:,}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    kept = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"Range": f"bytes={kept}-"} if kept else {})
    response = _answer(request, connect_seconds, stall_seconds)
    if response is not None:
        with response:
            _receive(response, part, path.name)
    if md5_of(part) != md5:
        part.unlink()
        raise DownloadError(f"what {urlsplit(url).hostname} sent is not the file (wrong checksum)")
    os.replace(part, path)


def md5_of(path: Path) -> str:
    """MD5 checksum of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _answer(request: Request, connect_seconds: float, stall_seconds: float) -> HTTPResponse | None:
    """The opened response; None when the kept part is already the whole file."""
    # In a thread of its own, since no timeout of the library covers looking up the name.
    box: queue.SimpleQueue[HTTPResponse | Exception] = queue.SimpleQueue()
    given_up = threading.Event()

    def ask() -> None:
        try:
            response = urlopen(request, timeout=stall_seconds)
        except NETWORK_ERRORS as error:
            box.put(error)
            return
        box.put(response)
        if given_up.is_set():
            response.close()

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = box.get(timeout=connect_seconds)
    except queue.Empty:
        given_up.set()
        answer = TimeoutError(f"no answer within {connect_seconds:g} s")
    if isinstance(answer, HTTPError):
        answer.close()
        if answer.code == 416:  # "range not satisfiable": nothing is left to send
            return None
    if isinstance(answer, Exception):
        host = urlsplit(request.full_url).hostname
        raise DownloadError(f"{host} did not answer ({_reason(answer)})") from answer
    return answer


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)  # urllib wraps the socket's own error
    return getattr(cause, "strerror", None) or str(cause) or type(error).__name__


def _receive(response: HTTPResponse, part: Path, name: str) -> None:
    """Append what comes to `part`, or begin it anew when the server sends from the start."""
    resumed = response.status == 206
    start = part.stat().st_size if resumed else 0
    length = response.headers.get("Content-Length")
    total = start + int(length) if length else None
    bar = tqdm(desc=name, initial=start, total=total, unit="B", unit_scale=True, leave=False)
    problem = ""
    with bar, open(part, "ab" if resumed else "wb") as file:
        while True:
            try:
                chunk = response.read(CHUNK_BYTES)
            except NETWORK_ERRORS as error:
                problem = f": {_reason(error)}"
                break
            if not chunk:
                break
            file.write(chunk)
            bar.update(len(chunk))
        received = file.tell()
    if problem or (total and received < total):
        size = format_bytes(received)
        raise DownloadError(f"the transfer stopped at {size}{problem}; the next call goes on there")
