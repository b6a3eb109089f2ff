"""Journals of elastic jobs read back, and what cannot be asked of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from no_namespaces import refuse_namespaces
from test_elastic import clean

from utils.ranks import elastic
from utils.ranks.elastic import run_elastic
from utils.ranks.recovery import ElasticRun, Fault, JournalError, Moment, read_journal

# Without a job


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": 3}, "one or two hosts"),
        ({"least_hosts": 2, "hosts": 1}, "one or two hosts"),
        ({"ranks_per_host": 0}, "1 to 16 ranks"),
        ({"timeout_seconds": 0}, "must be positive"),
        ({"faults": [Fault("kill a rank", 3, target=2)]}, "no such target"),
        ({"faults": [Fault("cut the link", 3)], "hosts": 1}, "no such target"),
        ({"faults": [Fault("kill a host", 3, target=0)]}, "does not survive its death"),
    ],
)
def test_jobs_that_cannot_be(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with pytest.raises(ValueError, match=words):
        run_elastic(tmp_path / "script.py", **given)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="check its name and folder"):
        run_elastic(tmp_path / "none.py")


def test_a_link_is_not_cut_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_namespaces(monkeypatch)
    monkeypatch.setattr(elastic, "is_unprivileged", lambda: False)
    (tmp_path / "script.py").write_text("")
    with pytest.raises(ValueError, match="A link cannot be cut here: no hosts of namespaces"):
        run_elastic(tmp_path / "script.py", faults=[Fault("cut the link", 3)])


@pytest.mark.parametrize(
    ("given", "words"),
    [(("set on fire", 3), "write one of kill a rank"), (("kill a rank", -1), "count from 0")],
)
def test_faults_that_cannot_be(given: tuple[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault(*given)


def test_a_journal_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"at": 1.5, "what": "step", "host": 0, "rank": 1, "step": 3}\n{"at": 2')
    found, end = read_journal(path)
    assert found == [Moment(1.5, "step", 0, 1, {"step": 3})]
    path.write_text(path.read_text() + '.0, "what": "done"}\n')
    assert read_journal(path, end)[0] == [Moment(2.0, "done")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "no JSON object"),
        ("no json", "did two writers mix"),
        ("[1]", "no JSON object"),
        ('{"at": 1.0, "what": "st{"at": 1.0, "what": "done"}', "no JSON object"),
        ("\\", "no JSON"),
        ('{"at": 1.0}', "`what` is None"),
        ('{"at": 1.0, "what": "fault"}', "'fault', and none of start"),
        ('{"at": 1.0, "what": ["done"]}', "`what` is"),
        ('{"what": "done"}', "`at` is None"),
        ('{"at": "now", "what": "done"}', "`at` is 'now'"),
        ('{"at": NaN, "what": "done"}', "`at` is nan"),
        ('{"at": 1.0, "what": "step"}', "`step` is None"),
        ('{"at": 1.0, "what": "step", "step": "3"}', "`step` is '3', and no whole number"),
        ('{"at": 1.0, "what": "step", "step": true}', "`step` is True"),
        ('{"at": 1.0, "what": "start", "step": 3, "pid": 7}', "`world` is None"),
        ('{"at": 1.0, "what": "start", "step": 3, "world": 7}', "`pid` is None"),
        ('{"at": 1.0, "what": "done", "rank": "one"}', "`rank` is 'one'"),
        ('{"at": 1.0, "what": "saw", "text": 3}', "`text` is no text"),
        ("[" * 100_000, "no JSON object"),
    ],
)
def test_a_damaged_journal_says_which_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"at": 1.5, "what": "done"}\n' + line.encode() + b"\n")
    with pytest.raises(JournalError, match=f"The journal journal holds .*{re.escape(words)}.*Each"):
        read_journal(path)


def test_a_journal_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="journal cannot be read: No such file"):
        read_journal(tmp_path / "journal")


NO_JOURNAL = """
import os
with open(os.environ["COURSE_JOURNAL"], "a") as journal:
    journal.write("step 3 is done\\n")
"""


def test_a_script_that_writes_no_journal_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NO_JOURNAL)
    with clean(tmp_path), pytest.raises(JournalError, match="holds 'step 3 is done'"):
        run_elastic(script, hosts=1, timeout_seconds=100)


def test_seconds_and_steps_of_a_recovery() -> None:
    fault = {"kind": "kill a rank", "at_step": 7, "target": 1, "seconds": 1.0}
    rows = [
        Moment(1.0, "start", 0, 0, {"world": 2, "step": 0}),
        Moment(1.0, "start", 1, 1, {"world": 2, "step": 0}),
        *(Moment(2.0 + step / 10, "step", 0, 0, {"step": step}) for step in range(8)),
        Moment(3.0, "fault", None, None, fault),
        Moment(3.2, "saw", 0, 0, {"text": "first"}),
        Moment(3.3, "saw", 0, 0, {"text": "second"}),
        Moment(6.0, "start", 0, 0, {"world": 1, "step": 5}),
        Moment(6.5, "step", 0, 0, {"step": 5}),
    ]
    run = ElasticRun(rows, "loopback", "", {})
    (found,) = run.recoveries
    assert found.saw == {0: (pytest.approx(0.2), "first")}
    assert found.noticed_seconds == pytest.approx(0.2) and found.back_seconds == pytest.approx(3.5)
    assert (found.ranks_before, found.ranks_after, found.steps_lost) == (2, 1, 3)
    assert found.named == "host 1: its agent and its ranks fell silent"
    assert run.worlds() == [(1.0, 2.7, 2, 0), (6.0, 6.5, 1, 5)]
    assert not run.is_done and run.result == {}


@pytest.mark.parametrize(
    ("news", "words"),
    [
        ([], "nobody"),
        ([("saw", 0, 0), ("saw", 0, 1), ("saw", 1, 2), ("saw", 1, 3)], "the network"),
        ([("saw", 0, 0), ("saw", 0, 1)], "host 1: its agent and its ranks"),
        ([("saw", 0, 0), ("saw", 0, 1), ("start", 1, 2)], "rank 2, 3 on host 1: it fell silent"),
        ([("saw", 0, 0), ("saw", 0, 1), ("agent started", 1, None), ("start", 1, 2)], "host 1:"),
        ([("saw", 0, 0), ("saw", 0, 1), ("saw", 1, 3)], "rank 2 on host 1"),
    ],
)
def test_who_is_to_blame_by_the_evidence(
    news: list[tuple[str, int, int | None]], words: str
) -> None:
    fault = {"kind": "kill a rank", "at_step": 7, "target": 1, "seconds": 1.0}
    more = {"world": 4, "step": 0, "text": ""}
    rows = [Moment(1.0, "start", rank // 2, rank, more) for rank in range(4)]
    rows.append(Moment(2.0, "fault", None, None, fault))
    rows += [Moment(3.0 + i, what, host, rank, more) for i, (what, host, rank) in enumerate(news)]
    (found,) = ElasticRun(rows, "loopback", "", {}).recoveries
    assert found.named.startswith(words), found.named
