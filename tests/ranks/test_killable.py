"""The killable process: what it returns, how it fails, and that it leaves nothing behind."""

import linecache
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from utils.ranks import ChildError, KillableProcess, pack, run_killable, run_to_outcome
from utils.ranks.killable import kill_all

ROOT = Path(__file__).resolve().parents[2]


def double(x):
    return 2 * x


def loop():
    while True:
        pass


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_gone(pid):
    """Whether a process has ended; where nobody reaps orphans it stays as a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test: as many processes and open files after it as before."""
    run_killable(double, 0, timeout_seconds=30)  # the server is meant to stay
    me = psutil.Process()
    before = len(me.children(recursive=True)), me.num_fds()
    yield
    assert wait_until(lambda: (len(me.children(recursive=True)), me.num_fds()) == before)
    assert not multiprocessing.active_children()


def test_returns_the_result_and_prints_what_was_printed(capsys):
    def talk(x):
        print("from the child")
        print("to stderr", file=sys.stderr)
        return {"x": x, "pid": os.getpid()}

    result = run_killable(talk, [1, 2], timeout_seconds=10)
    assert result["x"] == [1, 2] and result["pid"] != os.getpid()
    assert capsys.readouterr().out == "from the child\nto stderr\n"


def test_large_arguments_and_results_do_not_block():
    assert len(run_killable(double, b"x" * 20_000_000, timeout_seconds=30)) == 40_000_000


def test_more_prints_than_a_pipe_holds(capsys):
    assert run_killable(lambda: print("x" * 150_000), timeout_seconds=10) is None
    assert len(capsys.readouterr().out) == 150_001


def test_an_exception_brings_the_childs_own_traceback():
    def broken():
        nothing = {}
        return nothing["key"]

    with pytest.raises(ChildError, match="broken raised KeyError: 'key'") as caught:
        run_killable(broken, timeout_seconds=10)
    failure = caught.value.failure
    assert failure.kind == "raised"
    assert 'return nothing["key"]' in failure.traceback
    assert "utils/ranks" not in failure.traceback  # the learner's frames alone


def test_a_notebook_cell_keeps_its_source_in_the_traceback():
    source = "def cell_function():\n    return 1 / 0\n"
    # As IPython does it: no file, a cache entry without a time of change, and __main__.
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(True), "<cell 7>")
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), namespace)
    outcome = run_to_outcome(namespace["cell_function"], timeout_seconds=10)
    assert "return 1 / 0" in outcome.failure.traceback


def test_an_endless_loop_is_stopped_within_its_timeout():
    started = time.monotonic()
    outcome = run_to_outcome(loop, timeout_seconds=0.5)
    assert outcome.failure.kind == "timeout" and "0.5 s" in outcome.failure.what
    assert time.monotonic() - started < 5  # a loop without end would go on for ever


def test_endless_printing_is_stopped_and_cut():
    def chatter():
        print("first line")
        while True:
            print("and so on " * 100)

    outcome = run_to_outcome(chatter, timeout_seconds=0.5)
    assert outcome.failure.kind == "timeout"
    assert outcome.output.startswith("first line\n") and len(outcome.output) < 300_000


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "SIGKILL.*memory"), (signal.SIGSEGV, "SIGSEGV.*Compiled code")],
)
def test_a_signal_is_named(number, words):
    with pytest.raises(ChildError, match=words) as caught:
        run_killable(lambda: os.kill(os.getpid(), number), timeout_seconds=10)
    assert caught.value.failure.kind == "died"


def test_a_crash_after_the_result_is_no_success():
    def crash_later():
        threading.Timer(0.2, os.abort).start()
        return 7

    outcome = run_to_outcome(crash_later, timeout_seconds=10)
    assert outcome.value is None and outcome.failure.kind == "died"
    with pytest.raises(
        ChildError, match="crash_later gave its result and then was killed by SIGABRT"
    ):
        run_killable(crash_later, timeout_seconds=10)


def test_leaving_by_exit_is_no_result():
    assert "exit code 3" in run_to_outcome(os._exit, 3, timeout_seconds=10).failure.what
    assert "SystemExit" in run_to_outcome(sys.exit, 3, timeout_seconds=10).failure.what


def test_what_cannot_travel_is_refused_with_a_reason():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to another process.*inside the function"):
        run_killable(lambda: lock, timeout_seconds=10)
    with pytest.raises(ChildError, match="the result, a lock, cannot be sent back"):
        run_killable(threading.Lock, timeout_seconds=10)


def test_an_interrupt_ends_the_child():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_killable(loop, timeout_seconds=20)


def test_what_the_child_started_ends_with_it():
    def start_another():
        return subprocess.Popen(["sleep", "600"]).pid

    pid = run_killable(start_another, timeout_seconds=10)
    assert wait_until(lambda: is_gone(pid))


def test_what_it_started_in_another_group_ends_with_a_child_that_is_stopped():
    def start_another_and_loop():
        print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        loop()

    outcome = run_to_outcome(start_another_and_loop, timeout_seconds=1)
    assert outcome.failure.kind == "timeout"
    assert wait_until(lambda: is_gone(int(outcome.output)))


def start_a_daemon(folder):
    """A process of another session, whose parent is no more; its number is in the file `pid`."""
    command = f"setsid sleep 600 & echo $! > {folder}/pid"
    subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL)


def and_return():
    return None


def and_raise():
    raise ValueError("bad batch")


def and_exit():
    os._exit(0)


def and_die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [and_return, and_raise, and_exit, and_die, loop])
def test_what_it_left_behind_in_a_session_of_its_own_ends(tmp_path, end):
    def leave_a_child_and_a_daemon():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / "child").write_text(str(child.pid))
        start_a_daemon(tmp_path)
        end()

    run_to_outcome(leave_a_child_and_a_daemon, timeout_seconds=2)
    for name in ("child", "pid"):
        assert is_gone(int((tmp_path / name).read_text()))


def test_what_a_running_process_started_is_left_alone(tmp_path):
    def start_one_and_wait():
        start_a_daemon(tmp_path)
        print("started")
        time.sleep(600)

    process = KillableProcess(pack(start_one_and_wait, ()), timeout_seconds=60)
    try:
        process.start()
        assert wait_until(lambda: process.poll(0.1) or b"started" in process.output, seconds=20)
        run_killable(double, 1, timeout_seconds=10)
        assert not is_gone(int((tmp_path / "pid").read_text()))
    finally:
        kill_all([process])
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_without_adoption_a_process_names_its_children_before_it_ends(monkeypatch):
    """As on macOS."""
    monkeypatch.setattr("utils.ranks.killable.CAN_ADOPT", False)
    monkeypatch.setattr("utils.ranks.server.CAN_ADOPT", False)

    def leave_a_child():
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    pid = run_killable(leave_a_child, timeout_seconds=10)
    assert wait_until(lambda: is_gone(pid))


def test_several_can_be_waited_for_together():
    processes = [KillableProcess(pack(double, (n,)), timeout_seconds=10) for n in range(3)]
    outcomes = {}
    try:
        for process in processes:
            process.start()
        while len(outcomes) < 3:
            running = [p for p in processes if p not in outcomes]
            multiprocessing.connection.wait([w for p in running for w in p.waitables], timeout=10)
            found = {p: p.poll() for p in running}
            outcomes |= {p: outcome for p, outcome in found.items() if outcome}
    finally:
        for process in processes:
            process.kill()
    assert [outcomes[p].value for p in processes] == [0, 2, 4]


def test_where_it_stands_may_be_asked_again_and_again():
    def wait_here():
        time.sleep(600)

    process = KillableProcess(pack(wait_here, ()), timeout_seconds=60)
    try:
        process.start()
        while process.position().frame is None:
            assert process.poll(0.1) is None
        found = [process.position() for _ in range(100)]
    finally:
        process.kill()
    assert {at.frame.function for at in found if at.frame} == {"wait_here"}


def test_children_use_one_thread_and_find_torch_ready():
    def look():
        import torch

        return torch.get_num_threads(), "torch._dynamo" in sys.modules

    assert run_killable(look, timeout_seconds=10) == (1, True)


def test_windows_is_told_about_wsl(monkeypatch):
    def no_such_context(method):
        raise ValueError(f"cannot find context for {method!r}")

    monkeypatch.setattr(multiprocessing, "get_context", no_such_context)
    with pytest.raises(RuntimeError, match="WSL2"):
        run_killable(double, 1, timeout_seconds=10)
