"""Watching a run: metrics of ranks and GPUs, alert rules, and a Prometheus that scrapes and judges them."""

from utils.checked import check_public

from .exporter import DCGM, TRAINING, Exporter, Metric, StandInGpu, report
from .prometheus import (
    DASHBOARD,
    RULES,
    RULES_TEST,
    Alert,
    PrometheusError,
    Watch,
    prometheus_problem,
    promtool,
    watch,
)

__all__ = [
    "DASHBOARD", "DCGM", "RULES", "RULES_TEST", "TRAINING", "Alert", "Exporter", "Metric",
    "PrometheusError", "StandInGpu", "Watch", "prometheus_problem", "promtool", "report", "watch",
]  # fmt: skip

check_public(globals())
