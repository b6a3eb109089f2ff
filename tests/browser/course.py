"""A course opened in a real browser: JupyterLab on a copy of the repository, and Chromium."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from _browser import FLAGS, find_browser  # noqa: E402

__all__ = ["ROOT", "browser_page", "copy_course", "find_browser", "jupyter_lab"]
# Without windowing every cell is in the page, also those that are scrolled away.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def copy_course(target: Path) -> Path:
    """The repository's files without .venv and what git ignores: runs change only the copy."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, done.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def private_environment(folder: Path) -> dict[str, str]:
    """Jupyter's settings and files in a folder of their own; no GPU."""
    for name, values in SETTINGS.items():
        file = folder / "lab" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {
        "JUPYTERLAB_SETTINGS_DIR": folder / "lab",
        "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
        "JUPYTER_CONFIG_DIR": folder / "config",
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "IPYTHONDIR": folder / "ipython",
    }
    # The scoreboard lies where a learner has it, not where the tests put theirs.
    around = {name: value for name, value in os.environ.items() if name != "COURSE_SCOREBOARD"}
    return {**around, **{k: str(v) for k, v in places.items()}, "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def jupyter_lab(course: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a course on the loopback address; gives address and token, ends the server after."""
    token, log = secrets.token_hex(16), folder / "jupyter.log"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={token}"]
    command += ["--expose-app-in-browser", f"--ServerApp.root_dir={course}"]
    env = private_environment(folder)
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=course, env=env, stdout=out, stderr=out)
        try:
            yield wait_for_server(server, folder / "runtime", log), token
        finally:
            server.terminate()
            server.wait(timeout=300)


def wait_for_server(server: subprocess.Popen, runtime: Path, log: Path) -> str:
    """The address of a server once it answers."""
    record = runtime / f"jpserver-{server.pid}.json"
    for _ in range(600):
        if server.poll() is not None:
            break
        if record.is_file() and (text := record.read_text()):
            url = json.loads(text)["url"]
            with suppress(urllib.error.URLError):  # the record is written before it listens
                urllib.request.urlopen(f"{url}api", timeout=30).close()
                return url
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


@contextmanager
def browser_page(browser: str) -> Iterator[Page]:
    """An empty page of a browser with a profile of its own."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        try:
            yield page
        finally:
            chromium.close()
