"""An exporter of metrics as Prometheus scrapes them, fed by the ranks of a run through a folder.

Names, types and units of the GPU's metrics are those of NVIDIA's dcgm-exporter
(etc/default-counters.csv). Their values come from a stand-in, since no GPU need be here: it makes
temperature and power of how busy a rank says it is. On a cluster dcgm-exporter serves the real ones,
at port 9400, and the rules and the dashboard stay as they are.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

LOCALHOST = "127.0.0.1"


class Metric(NamedTuple):
    """A metric's name, type and meaning."""

    name: str
    kind: str
    meaning: str


DCGM = (
    Metric("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C)."),
    Metric("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W)."),
    Metric("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %)."),
    Metric("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB)."),
    Metric("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered."),
    Metric("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether remapping of rows has failed"),
)
TRAINING = (
    Metric("training_step", "gauge", "Steps that this rank has done."),
    Metric("training_loss", "gauge", "Loss of the last step."),
    Metric("training_own_seconds", "gauge", "Of the last step, before it waits for other ranks."),
    Metric("training_last_step_timestamp_seconds", "gauge", "When the last step was done."),
    Metric("training_weights_checksum", "gauge", "32 bits of the weights: replicas must agree."),
)
_IDLE_CELSIUS, _BUSY_CELSIUS, _IDLE_WATTS, _BUSY_WATTS = 35.0, 70.0, 70.0, 650.0
_WARMING = 0.3  # share of the way to its final temperature that a stand-in goes in a step


@dataclass
class StandInGpu:
    """What a GPU's sensors would say, made of how busy a rank is. A stand-in, and no measurement.

    Attributes:
        xid: Of the last error; 0 for none. Plant one here.
        extra_celsius: Of a fan that stands still. Plant it here.
    """

    xid: int = 0
    extra_celsius: float = 0.0
    celsius: float = _IDLE_CELSIUS

    def after(self, busy_share: float, used_bytes: int) -> dict[str, float]:
        """The metrics after a step in which the rank computed for that share of the time.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0 <= busy_share <= 1:
            raise ValueError(f"busy_share={busy_share!r}: a share of time lies between 0 and 1.")
        goal = _IDLE_CELSIUS + busy_share * (_BUSY_CELSIUS - _IDLE_CELSIUS) + self.extra_celsius
        self.celsius += _WARMING * (goal - self.celsius)
        return {
            "DCGM_FI_DEV_GPU_TEMP": round(self.celsius),
            "DCGM_FI_DEV_POWER_USAGE": _IDLE_WATTS + busy_share * (_BUSY_WATTS - _IDLE_WATTS),
            "DCGM_FI_DEV_GPU_UTIL": round(100 * busy_share),
            "DCGM_FI_DEV_FB_USED": used_bytes // 2**20,
            "DCGM_FI_DEV_XID_ERRORS": self.xid,
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
        }


def report(folder: str | os.PathLike[str], rank: int, values: dict[str, float]) -> None:
    """A rank's metrics, in place of those before; a reader sees the old ones or the new ones.

    Raises:
        ValueError: a name that no metric has, or a folder that is none.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"folder is {str(folder)!r}, and there is no such folder.")
    known = {metric.name for metric in (*DCGM, *TRAINING)}
    if unknown := set(values) - known:
        raise ValueError(f"There is no metric {', '.join(sorted(unknown))}; see DCGM and TRAINING.")
    path = Path(folder, f"rank_{rank}.json")
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(values), encoding="utf-8")
    draft.replace(path)


class Exporter:
    """Serves what ranks reported at http://127.0.0.1:PORT/metrics; use it in a `with` statement."""

    def __init__(self, folder: str | os.PathLike[str], host: str = "host0") -> None:
        self._folder, self._host = Path(folder), host
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.page().encode() if self.path == "/metrics" else b""
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        self._server = ThreadingHTTPServer((LOCALHOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def address(self) -> str:
        """Host and port, as Prometheus takes a target."""
        return f"{LOCALHOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Exporter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self) -> str:
        """All metrics in Prometheus's text format."""
        ranks = {
            int(path.stem.partition("_")[2]): json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(self._folder.glob("rank_*.json"))
        }
        lines = []
        for metric in (*DCGM, *TRAINING):
            rows = [
                f"{metric.name}{{{self._labels(metric, rank)}}} {_number(values[metric.name])}"
                for rank, values in sorted(ranks.items())
                if metric.name in values
            ]
            if rows:
                lines += [
                    f"# HELP {metric.name} {metric.meaning}",
                    f"# TYPE {metric.name} {metric.kind}",
                    *rows,
                ]
        return "\n".join([*lines, ""])

    def _labels(self, metric: Metric, rank: int) -> str:
        label = "gpu" if metric in DCGM else "rank"
        return f'{label}="{rank}",Hostname="{self._host}"'


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
