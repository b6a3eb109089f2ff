"""What the words of pip, uv and the system mean for a learner, and what to do then."""

from __future__ import annotations

import re

# The first pattern that is found counts. The order matters: without a network pip ends with "No
# matching distribution" too, and uv ends with "No solution found" for four different reasons.
WAYS_OUT = {
    r"No space left on device|Disk quota exceeded|Errno 28|os error 28": (
        "The disk is full. Free some space and run `make setup` again; what is in uv's store of "
        "downloads goes with `.venv/bin/python -m uv cache clean`."
    ),
    r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate": (
        "The package index was reached, but its certificate was not accepted. Behind a company "
        "proxy, set PIP_CERT to that proxy's certificate file and run `make setup` again."
    ),
    r"40[137] (?:Unauthorized|Forbidden|Proxy)|lack of valid authentication": (
        "The package index, or a proxy before it, refused access. Check the name and password in "
        "its address (PIP_INDEX_URL, HTTPS_PROXY, or pip's configuration file)."
    ),
    r"NewConnectionError|NameResolutionError|name resolution|Name or service not known"
    r"|nodename nor servname|ConnectTimeout|ReadTimeout|timed out|ProxyError"
    r"|Connection (?:refused|reset)|Network is unreachable|dns error"
    r"|error sending request|Request failed after|HTTP status server error": (
        "The package index cannot be reached. Check the network (behind a proxy: HTTPS_PROXY) "
        "and run `make setup` again; what was downloaded is kept."
    ),
    r"Failed to initialize cache": (
        "uv's store of downloads cannot be written. Set UV_CACHE_DIR to a folder of your own and "
        "run `make setup` again."
    ),
    r"Permission denied|not permitted|Read-only file system|Errno (?:13|30)|os error (?:13|30)": (
        "This folder cannot be written to. Clone the repository into a folder of your own."
    ),
    r"not found in the package registry|from versions: none": (
        "The package index answers, but it has no such package: its address may be wrong. Check "
        "TORCH_INDEX, PIP_INDEX_URL and pip's configuration (`python3 -m pip config list`)."
    ),
    r"has no wheels with a matching|only found wheels for|does not satisfy Python": (
        "A package has no build for this Python on this machine. Delete .venv and try another "
        "Python: `make setup PYTHON=python3.12`."
    ),
    r"there is no version of|there are no versions of|No matching distribution found": (
        "The package index lacks a version that constraints.txt names: it may be a copy that is "
        "out of date, or have none for this Python. Delete constraints.txt to take what there is."
    ),
    r"ResolutionImpossible|conflicting dependencies|No solution found": (
        "The versions asked for do not go together. Undo changes with `git checkout "
        "pyproject.toml constraints.txt`, or delete constraints.txt to have them chosen anew."
    ),
}


class SetupError(Exception):
    """A step that failed; its text says what to do."""


def explain(problem: str | OSError) -> str:
    """The way out of a failed pip or uv by all that it printed, or of what the system refused."""
    output = " ".join(str(problem).split())  # some versions of uv break their sentences into lines
    otherwise = "The installer's last lines stand above. Run `make setup` again to go on."
    if isinstance(problem, OSError):
        otherwise = f"The system refused: {problem}."
    return next((way for pattern, way in WAYS_OUT.items() if re.search(pattern, output)), otherwise)


def show_end(output: str) -> None:
    """Print the end of an output as a person can read it: no warnings, no line over 160 letters."""
    lines = [line.rstrip() for line in output.splitlines()]
    kept = [line for line in lines if line and not line.lower().startswith("warning")]
    print("", *(line[:160] for line in kept[-5:]), sep="\n")
