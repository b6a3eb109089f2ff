"""Ranks that fail: each time the right message, in time, nothing left, and the next launch works."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_cases import nothing_left

from utils.ranks import RankError, run_ranks
from utils.ranks.killable import EXIT_SECONDS

TIMEOUT = 3.0


def ones():
    total = torch.ones(2)
    dist.all_reduce(total)
    return total[0].item()


@pytest.fixture(autouse=True)
def next_launch_works_and_nothing_is_left():
    assert run_ranks(ones, 2) == [2.0, 2.0]
    with nothing_left():
        yield
    assert run_ranks(ones, 2) == [2.0, 2.0]


def failure_of(worker, world_size=3):
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(worker, world_size, timeout_seconds=TIMEOUT)
    assert time.monotonic() - started < TIMEOUT + 20  # and not for ever: two cores may be busy
    return caught.value


def test_a_rank_raises_while_the_others_wait():
    def worker():
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(2))

    error = failure_of(worker)
    assert error.rank == 1
    text = str(error)
    assert text.startswith("worker: rank 1 raised ValueError: bad batch")
    assert 'raise ValueError("bad batch")' in text  # its own traceback
    assert "rank 0 stood in all_reduce at line" in text and "of worker" in text


def test_all_ranks_raise_and_the_first_is_shown():
    def worker():
        return {}[f"key of rank {dist.get_rank()}"]

    error = failure_of(worker)
    assert error.rank == 0 and "KeyError: 'key of rank 0'" in str(error)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def before_it():
    if dist.get_rank() == 2:
        kill_myself()
    dist.all_reduce(torch.ones(2))


def inside_it():
    if dist.get_rank() == 2:
        threading.Timer(0.5, kill_myself).start()  # while it waits for rank 0
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(2))


def after_it():
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 2:
        kill_myself()
    time.sleep(60)


@pytest.mark.parametrize("worker", [before_it, inside_it, after_it])
def test_a_rank_is_killed(worker):
    error = failure_of(worker)
    assert error.rank == 2
    assert "rank 2 was killed by SIGKILL" in str(error) and "memory" in str(error)


def test_a_rank_sleeps_for_ever():
    def worker():
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(2))

    error = failure_of(worker)
    assert error.rank == 1
    text = str(error)
    assert "rank 1 did not finish within 3 s" in text and "of worker" in text
    assert "rank 0 stood in all_reduce" in text and "rank 2 stood in all_reduce" in text


def test_a_rank_calls_one_collective_less():
    def worker():
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() != 0:
            dist.all_reduce(torch.ones(2))

    error = failure_of(worker)
    assert error.rank in (1, 2)
    assert "stood in all_reduce" in str(error) and "rank 0 had finished" in str(error)


def test_ranks_call_different_collectives():
    def worker():
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.all_gather_object([None] * 3, "x")
        dist.all_reduce(torch.ones(2))

    text = str(failure_of(worker))
    assert "The ranks stood in different collectives: rank 0 in barrier" in text
    assert "rank 1 in all_gather_object" in text and "same order" in text


def test_one_that_sends_and_one_that_receives_are_not_in_different_collectives():
    def worker():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(2), 1)
        elif dist.get_rank() == 2:
            dist.send(torch.ones(10**7), 1)
        time.sleep(60)

    text = str(failure_of(worker))
    assert "rank 0 stood in recv" in text and "rank 2 stood in send" in text
    assert "different collectives" not in text


def test_ranks_give_different_sizes():
    def worker():
        dist.all_reduce(torch.ones(2 + 1000 * dist.get_rank()))
        dist.barrier()

    text = str(failure_of(worker, world_size=2))
    assert text.startswith("worker: rank 0 was killed by SIGABRT")
    assert "different sizes to one collective, all_reduce: rank 1 gave [1002] float." in text
    assert "rank 1 stood in all_reduce at line" in text


def too_few():
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(2 - dist.get_rank() // 2))
    dist.barrier()


def too_few_and_not_waited_for():
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(2 - dist.get_rank() // 2), async_op=True).wait()


@pytest.mark.parametrize("worker", [too_few, too_few_and_not_waited_for])
def test_sizes_are_named_where_ranks_wait_for_ever(worker):
    text = str(failure_of(worker))
    assert "did not finish within 3 s" in text
    assert (
        "The ranks gave tensors of different sizes to one collective, all_reduce: rank 0 gave "
        "[2] float, rank 1 gave [2] float, rank 2 gave [1] float."
    ) in text


def test_equal_sizes_are_not_blamed():
    def worker():
        dist.all_gather_object([None] * 3, "x" * dist.get_rank())
        if dist.get_rank():
            dist.all_reduce(torch.ones(2))
        else:
            time.sleep(60)

    assert "sizes" not in str(failure_of(worker))


def test_a_gpu_that_is_not_there():
    def worker():
        torch.ones(2).cuda()

    text = str(failure_of(worker, world_size=2))
    assert "write .to(rank_device()) instead of .cuda()" in text


def test_a_rank_leaves_by_exit():
    def worker():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    error = failure_of(worker)
    assert error.rank == 1 and "exit code 3" in str(error)


def abort_at_exit():
    Finalize(None, os.abort, exitpriority=1)


def abort_by_a_thread():
    threading.Timer(0.3, os.abort).start()


def exit_by_a_thread():
    threading.Timer(0.3, os._exit, (3,)).start()


@pytest.mark.parametrize(
    ("end_badly", "how"),
    [
        (abort_at_exit, "was killed by SIGABRT"),
        (abort_by_a_thread, "was killed by SIGABRT"),
        (exit_by_a_thread, "ended with exit code 3"),
    ],
)
def test_a_rank_that_ends_badly_after_its_result(end_badly, how, capfd):
    def worker():
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            os.write(2, b"terminate called\n")
            end_badly()
        return "a result"

    error = failure_of(worker)
    assert error.rank == 1 and list(error.failures) == [1]
    assert f"rank 1 gave its result and then {how}. Something that it had started" in str(error)
    assert capfd.readouterr().out == "[rank 1] terminate called\n"


def test_the_server_is_killed():
    def worker():
        if dist.get_rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    text = str(failure_of(worker, world_size=2))
    assert "exit code 255" in text and "when the process that starts the others was killed" in text


def test_threads_that_go_on_are_stopped_together():
    def worker():
        threading.Thread(target=time.sleep, args=(600,)).start()
        return dist.get_rank()

    started = time.monotonic()
    assert run_ranks(worker, 3) == [0, 1, 2]
    assert time.monotonic() - started < 2 * EXIT_SECONDS  # not one after another


def test_what_cannot_travel():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        run_ranks(lambda: lock, 2)


def test_a_result_that_cannot_travel_names_the_rank():
    def worker():
        return threading.Lock() if dist.get_rank() == 1 else None

    error = failure_of(worker)
    assert error.rank == 1 and "a lock, cannot be sent back" in str(error)


def test_an_interrupt_ends_all_ranks():
    def worker():
        time.sleep(600)

    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(worker, 3)
    assert time.monotonic() - started < 4


PARENT = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from utils.ranks import run_ranks

def worker():
    total = torch.ones(2)
    dist.all_reduce(total)
    return (torch.randn(200, 200) @ torch.randn(200, 200)).shape[0] * total[0].item()

torch.set_num_threads(8)
large = torch.randn(1500, 1500)
(large @ large).sum().item()
layer = torch.nn.Linear(500, 500)
layer(torch.randn(400, 500)).sum().backward()
print(run_ranks(worker, 4))
"""


def test_a_parent_that_has_used_all_its_threads(tmp_path):
    root = str(Path(__file__).resolve().parents[2])
    (tmp_path / "parent.py").write_text(PARENT.format(root=root))
    found = subprocess.run(
        [sys.executable, "parent.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "[800.0, 800.0, 800.0, 800.0]", found.stderr
