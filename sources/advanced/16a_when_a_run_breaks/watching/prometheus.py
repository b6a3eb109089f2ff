"""A real Prometheus on loopback that scrapes an exporter and judges alert rules, where it is installed.

`apt-get install prometheus` brings it and promtool. It listens on 127.0.0.1, writes into a temporary
folder, and ends with the block that started it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.files import scratch
from utils.parallel.loopback import loopback_port

from .exporter import LOCALHOST

_HERE = Path(__file__).with_name("rules")
RULES, RULES_TEST, DASHBOARD = (
    _HERE / n for n in ("alerts.yml", "alerts_test.yml", "dashboard.json")
)
START_SECONDS = 30.0
LOOK_SECONDS = 0.1
PORTS = 5  # that are tried: another program may take one between our choice and its start


class PrometheusError(RuntimeError):
    """Prometheus is not here, refused a file, or did not answer; the text says which."""


@dataclass(frozen=True)
class Alert:
    """An alert that Prometheus holds: `state` is "pending" or "firing"."""

    name: str
    state: str
    labels: dict[str, str]
    summary: str


def prometheus_problem() -> str:
    """Why no Prometheus can be started here, as a sentence; "" if one can."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if not missing:
        return ""
    return (
        f"There is no {' and no '.join(missing)} here: on Debian and Ubuntu "
        "`apt-get install prometheus` brings both."
    )


def promtool(*words: str | Path) -> str:
    """What promtool says, such as `promtool("test", "rules", RULES_TEST)`.

    Raises:
        PrometheusError: there is none, or it found something wrong.
    """
    if shutil.which("promtool") is None:
        raise PrometheusError(prometheus_problem())
    done = subprocess.run(
        ["promtool", *map(str, words)], capture_output=True, text=True, timeout=60
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise PrometheusError(f"promtool {' '.join(map(str, words[:2]))} refuses it:\n{said}")
    return said


class Watch:
    """A running Prometheus; ask it."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self._process = port, process

    def ask(self, path: str) -> Any:
        """The data of an answer of its HTTP interface, such as `ask("query?query=up")`.

        Raises:
            PrometheusError: it does not answer.
        """
        url = f"http://{LOCALHOST}:{self.port}/api/v1/{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except (OSError, ValueError, KeyError) as error:
            raise PrometheusError(f"Prometheus does not answer {path!r}: {error}") from error

    def alerts(self) -> list[Alert]:
        """Those that are pending or firing."""
        return [
            Alert(
                row["labels"].pop("alertname"),
                row["state"],
                row["labels"],
                row["annotations"].get("summary", ""),
            )
            for row in self.ask("alerts")["alerts"]
        ]

    def wait_for(self, name: str, seconds: float = 30.0) -> tuple[Alert, float]:
        """Wait until an alert fires; it, and how many seconds that took.

        Raises:
            PrometheusError: it did not within this time.
        """
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            firing = [a for a in self.alerts() if a.name == name and a.state == "firing"]
            if firing:
                return firing[0], passed
            time.sleep(LOOK_SECONDS)
        others = ", ".join(f"{a.name} ({a.state})" for a in self.alerts()) or "none"
        raise PrometheusError(f"{name} did not fire within {seconds:g} s; alerts now: {others}.")


@contextlib.contextmanager
def watch(
    targets: Sequence[str], rules: Path = RULES, scrape_seconds: float = 0.25
) -> Iterator[Watch]:
    """A Prometheus that scrapes these addresses and judges these rules while the block runs.

    Raises:
        PrometheusError: there is none, it refuses a file, or does not start.
    """
    if problem := prometheus_problem():
        raise PrometheusError(problem)
    with scratch("prometheus") as folder:
        settings = folder / "prometheus.yml"
        settings.write_text(_settings(targets, rules.resolve(), scrape_seconds), encoding="utf-8")
        promtool("check", "config", settings)
        process, port = _started(folder)
        try:
            yield Watch(port, process)
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _settings(targets: Sequence[str], rules: Path, seconds: float) -> str:
    every = f"{1000 * seconds:.0f}ms"
    return json.dumps(
        {  # JSON is YAML
            "global": {
                "scrape_interval": every,
                "scrape_timeout": every,
                "evaluation_interval": every,
            },
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": list(targets)}]}],
        }
    )


def _started(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(PORTS):
        port = loopback_port()
        # It dies with whoever started it, also where that is killed.
        with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        log = (folder / "log").open("wb")
        with log:
            process = subprocess.Popen(
                [
                    *with_us,
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--log.level=warn",
                    f"--web.listen-address={LOCALHOST}:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        if _is_ready(port, process):
            return process, port
        process.kill()
        process.wait()
    said = (folder / "log").read_text(errors="replace")[-1000:]
    raise PrometheusError(f"Prometheus did not start on loopback; it said:\n{said}")


def _is_ready(port: int, process: subprocess.Popen[bytes]) -> bool:
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"http://{LOCALHOST}:{port}/-/ready", timeout=2):
                return process.poll() is None
        time.sleep(LOOK_SECONDS)
    return False
