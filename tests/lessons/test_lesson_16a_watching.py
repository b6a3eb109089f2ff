"""Metrics, rules and the dashboard: names that exist, alerts that fire, a Prometheus that goes away."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from utils.lessons.lesson_16a.watching import (
    DASHBOARD,
    DCGM,
    RULES,
    RULES_TEST,
    TRAINING,
    Exporter,
    PrometheusError,
    StandInGpu,
    prometheus,
    prometheus_problem,
    promtool,
    report,
    watch,
)
from utils.ranks import run_killable

with_prometheus = pytest.mark.skipif(
    bool(prometheus_problem()), reason=prometheus_problem() or "it is here"
)
NAMES = {metric.name for metric in (*DCGM, *TRAINING)}
USED = re.compile(r"\b(?:DCGM_\w+|training_\w+)")


def read(exporter: Exporter, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{exporter.address}{path}", timeout=10) as answer:
        return answer.read().decode()


def test_the_exporter_serves_what_ranks_report(tmp_path: Path) -> None:
    gpu = StandInGpu()
    for _ in range(30):
        values = gpu.after(1.0, 3 * 2**20)
    report(tmp_path, 1, values | {"training_loss": math.nan})
    report(tmp_path, 0, {"training_step": 3})
    with Exporter(tmp_path, "host7") as exporter:
        page = read(exporter)
        assert exporter.address.startswith("127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(exporter, "/")
    assert (
        '# TYPE DCGM_FI_DEV_GPU_TEMP gauge\nDCGM_FI_DEV_GPU_TEMP{gpu="1",Hostname="host7"} 70\n'
        in page
    )
    assert 'DCGM_FI_DEV_FB_USED{gpu="1",Hostname="host7"} 3\n' in page
    assert 'training_step{rank="0",Hostname="host7"} 3\n' in page
    assert 'training_loss{rank="1",Hostname="host7"} NaN\n' in page


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        StandInGpu().after(share, 0)


def test_a_metric_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no metric DCGM_TEMP"):
        report(tmp_path, 0, {"DCGM_TEMP": 3.0})


def test_rules_and_dashboard_use_metrics_that_are_served() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = set(USED.findall(" ".join(target["expr"] for p in panels for target in p["targets"])))
    judged = set(USED.findall(RULES.read_text()))
    assert shown <= NAMES and judged - {"training_"} <= NAMES, (shown | judged) - NAMES
    assert {"DCGM_FI_DEV_XID_ERRORS", "training_own_seconds"} <= shown & judged
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places), "panels lie on each other"


def test_every_alert_has_a_test_where_it_fires() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    fires = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", RULES_TEST.read_text())
    assert alerts == set(fires) and len(alerts) == 9


@with_prometheus
def test_promtool_accepts_the_rules_and_refuses_wrong_ones(tmp_path: Path) -> None:
    assert "9 rules found" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", RULES_TEST)
    wrong = tmp_path / "alerts.yml"
    (tmp_path / RULES_TEST.name).write_text(RULES_TEST.read_text())
    late, blind = ("> 300", "> 400"), (" or absent(training_last_step_timestamp_seconds)", "")
    for right, other in (late, blind):
        assert right in RULES.read_text()
        wrong.write_text(RULES.read_text().replace(right, other))
        with pytest.raises(PrometheusError, match=r"(?s)promtool test rules refuses it.*RunStands"):
            promtool("test", "rules", tmp_path / RULES_TEST.name)
    wrong.write_text("groups:\n\t- name: a tab")
    with pytest.raises(PrometheusError, match="refuses it"):
        promtool("check", "rules", wrong)
    with pytest.raises(PrometheusError, match="refuses it"), watch([], wrong):
        pass


@with_prometheus
def test_a_real_prometheus_rings_and_goes_away(tmp_path: Path) -> None:
    run_killable(int, timeout_seconds=60)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    gpu = StandInGpu()
    report(tmp_path, 0, gpu.after(0.5, 0))
    with Exporter(tmp_path) as exporter, watch([exporter.address]) as running:
        (child,) = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        listens = {c.laddr.ip for c in child.net_connections() if c.status == psutil.CONN_LISTEN}
        assert listens == {"127.0.0.1"}, f"Prometheus listens on {listens}"
        with pytest.raises(PrometheusError, match=r"GpuIsLost did not fire within 1 s"):
            running.wait_for("GpuIsLost", seconds=1)
        gpu.xid = 79
        report(tmp_path, 0, gpu.after(0.0, 0))
        alert, _ = running.wait_for("GpuIsLost", seconds=60)
        assert alert.labels["gpu"] == "0" and "XID 79" in alert.summary
        assert [row["value"][1] for row in running.ask("query?query=up")["result"]] == ["1"]
    assert not child.is_running(), "Prometheus is left"
    with pytest.raises(PrometheusError, match="does not answer"):
        running.alerts()


def test_without_prometheus_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus.shutil, "which", lambda name: None)
    assert "apt-get install prometheus" in prometheus_problem()
    with pytest.raises(PrometheusError, match="There is no prometheus and no promtool"):
        promtool("check", "rules", RULES)
    with pytest.raises(PrometheusError, match="apt-get install"), watch([]):
        pass
