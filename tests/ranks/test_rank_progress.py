"""What `run_ranks` shows while ranks run: a bar with what they draw, apart from what they print."""

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from utils.ranks import progress, run_ranks
from utils.ranks.printed_lines import RankLines

ROOT = Path(__file__).resolve().parents[2]
PRINTED = {f"[rank {rank}] line {n}" for rank in (0, 1) for n in (3, 7)}


class Terminal(io.StringIO):
    """A screen that both streams of this process draw on; it remembers when what was written."""

    def __init__(self):
        super().__init__()
        self.times = []

    def isatty(self):
        return True

    def write(self, text):
        self.times.append((time.time(), text))
        return super().write(text)

    def lines(self):
        """What is left of each line, when what was written later stands over what was there."""
        return [self._seen(line).rstrip() for line in self.getvalue().split("\n")]

    @staticmethod
    def _seen(line):
        seen = ""
        for text in line.split("\r"):
            seen = text + seen[len(text) :]
        return seen


def on_terminal(worker, monkeypatch):
    """Run two ranks with both streams on a terminal; not in a fixture: pytest swaps the streams."""
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.2)
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        return run_ranks(worker, 2), screen


def draw():
    """As tqdm does it: the line is drawn anew from its beginning, and never ended."""
    for step in range(8):
        sys.stderr.write(f"\rstep {step} of 8 \x1b[A")
        sys.stderr.flush()
        time.sleep(0.3)
        if step in (3, 7):
            sys.stderr.write("\r\x1b[K")
            print(f"\rline {step}")
    return time.time()


def test_what_a_rank_draws_is_seen_while_it_runs(monkeypatch):
    ends, terminal = on_terminal(draw, monkeypatch)
    ended = min(ends)
    drawn = [text for at, text in terminal.times if "step" in text and at < ended]
    assert len(drawn) >= 3 and all("ranks: 0/2" in text for text in drawn)
    assert all(re.search(r", rank [01]: step \d of 8$", text.rstrip()) for text in drawn)


def test_prints_stand_in_lines_of_their_own_and_the_bar_is_taken_away(monkeypatch):
    _, terminal = on_terminal(draw, monkeypatch)
    assert "ranks: 0/2" in terminal.getvalue()
    *lines, last = terminal.lines()
    assert set(lines) == PRINTED and len(lines) == len(PRINTED) and last == ""


def test_the_lowest_rank_that_draws_is_shown(monkeypatch):
    def worker():
        for step in range(6):
            if dist.get_rank() == 1:
                print(f"done {step}", end="\r")
            time.sleep(0.2)

    _, terminal = on_terminal(worker, monkeypatch)
    assert re.search(r", rank 1: done \d", terminal.getvalue())
    assert ", rank 0" not in terminal.getvalue()


def test_a_bar_may_be_turned_off(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    _, terminal = on_terminal(draw, monkeypatch)
    assert set(terminal.lines()) == {*PRINTED, ""} and "ranks:" not in terminal.getvalue()


PIPED = """
import sys, time
sys.path.insert(0, {root!r})
from utils.ranks import run_ranks

def worker():
    for step in range(24):
        print(f"\\rstep {{step}}", end="")
        time.sleep(0.1)
    print("\\rdone")

run_ranks(worker, 2)
"""


def test_nothing_of_the_bar_is_written_into_a_pipe():
    found = subprocess.run(
        [sys.executable, "-c", PIPED.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert sorted(found.stdout.splitlines()) == ["[rank 0] done", "[rank 1] done"]
    assert found.stderr == ""


class Printed:
    """Stands for a process: what it printed so far."""

    has_lost_prints = False

    def __init__(self):
        self.output = bytearray()


def test_only_what_is_drawn_over_is_live():
    process = Printed()
    lines = RankLines(2, process)
    steps = [
        (b"half a ", [], ""),
        (b"line\n\r", ["[rank 2] half a line"], ""),
        (b"10%\r", [], "rank 2: 10%"),
        (b"20%\r", [], "rank 2: 20%"),
        (b"\x1b[32m100%\x1b[0m", [], "rank 2: 100%"),
        (b"\nnext", ["[rank 2] \x1b[32m100%\x1b[0m"], ""),
    ]
    for printed, complete, live in steps:
        process.output += printed
        assert (lines.take(), lines.live) == (complete, live)
    process.output += b"\r" + b"x" * 500
    assert len(lines.live) == 100
    assert lines.take_rest() == ["[rank 2] " + "x" * 500] and lines.live == ""


def test_prints_that_are_not_kept_are_said(capsys):
    def chatter():
        for _ in range(400):
            print("and so on " * 100)

    run_ranks(chatter, 1)
    assert capsys.readouterr().out.endswith("[rank 0] (more was printed, and not kept)\n")
