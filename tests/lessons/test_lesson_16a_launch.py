"""The command that lesson 16a prints is the one that its job runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from utils.lessons.lesson_16a.launch import launch_command
from utils.ranks.elastic import RESTARTS, Patience
from utils.ranks.elastic_job import ElasticJob, JobOrder


@pytest.mark.parametrize("linked", [True, False])
def test_the_printed_command_is_the_one_that_runs(linked: bool, tmp_path: Path) -> None:
    """But for where logs go, and the script's own arguments."""
    order = JobOrder(
        Path("train.py"), (), 2, 1, 1, (), RESTARTS, None, Patience(), timeout_seconds=1.0
    )
    places = ("a", "b") if linked else (None, None)
    ran = ElasticJob(order, tmp_path, places, [])._arguments(0)
    told = launch_command(linked=linked)
    assert max(map(len, told.splitlines())) < 100, "a slide shows each line whole"
    text = told.replace("$FOLDER", str(tmp_path))
    program, *printed = shlex.split(text.replace("\\\n", ""))  # as a shell joins lines
    assert program == "torchrun"
    logs = ("--tee", "--log-dir")
    assert sorted(printed) == sorted(word for word in ran if not word.startswith(logs))
