"""Ranks from a notebook: results, prints, memory, traffic, and nothing left behind."""

import inspect
import os
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_cases import left, nothing_left, server_of_torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.lessons.lesson_11.hosts import run_hosts
from utils.memory import measure
from utils.ranks import prepare_ranks, run_killable, run_ranks, run_torchrun, server, traffic
from utils.ranks.elastic import run_elastic
from utils.shims.forkserver import server_pid


def add_up(x):
    total = torch.full((3,), float(dist.get_rank() + x))
    dist.all_reduce(total)
    return total[0].item()


def test_results_come_back_by_rank():
    def who():
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), os.getpid()

    found = run_ranks(who, 3)
    assert [row[:3] for row in found] == [(rank, 3, "gloo") for rank in range(3)]
    assert len({row[3] for row in found} | {os.getpid()}) == 4


def test_ranks_come_from_the_server_that_was_prepared():
    prepare_ranks()
    prepared = server_pid()
    assert prepared is not None and run_ranks(os.getppid, 2) == [prepared] * 2
    prepare_ranks()
    assert server_pid() == prepared, "a second call finds it running"


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_collectives(world_size):
    expected = sum(rank + 1 for rank in range(world_size))
    assert run_ranks(add_up, world_size, 1) == [expected] * world_size


def test_the_variables_of_torchrun_are_set():
    def look():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        return [os.environ[name] for name in names]

    assert run_ranks(look, 2)[1] == ["1", "1", "2", "2", "127.0.0.1"]


def test_one_thread_a_rank():
    assert run_ranks(torch.get_num_threads, 2) == [1, 1]


def test_prints_are_prefixed_whole_lines(capsys):
    def talk():
        for part in range(200):
            sys.stdout.write(f"part {part} ")
            sys.stdout.flush()
        print()
        print("second line")
        sys.stdout.write("\rbar 10%\rbar 100%\n")
        sys.stdout.write("no end")

    run_ranks(talk, 3)
    lines = capsys.readouterr().out.splitlines()
    whole = " ".join(f"part {part}" for part in range(200)) + " "
    expected = [whole, "second line", "bar 100%", "no end"]
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {text}" for text in expected]
    assert len(lines) == 12


def test_prints_are_shown_while_ranks_run(capsys):
    shown = []

    def talk():
        print("early")
        time.sleep(1.5)
        return time.time()

    class Watching:
        def write(self, text):
            shown.append((text, time.time()))

        def flush(self):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Watching())
        ended = run_ranks(talk, 2)
    assert all(at < min(ended) for text, at in shown if "early" in text)
    assert sum(text.count("early") for text, _ in shown) == 2


def test_a_rank_that_leaves_first_does_not_break_what_is_under_way():
    def send_much():
        numbers = torch.arange(2_000_000.0)
        if dist.get_rank() == 0:
            dist.send(numbers, 1)
            return None
        time.sleep(0.5)
        received = torch.empty_like(numbers)
        dist.recv(received, 0)
        return torch.equal(received, numbers)

    assert run_ranks(send_much, 2) == [None, True]


def test_a_worker_may_leave_the_group_itself():
    def leave():
        rank = dist.get_rank()
        dist.destroy_process_group()
        return rank

    assert run_ranks(leave, 2) == [0, 1]


def test_a_loader_in_a_rank_may_have_workers():
    class Squares(torch.utils.data.Dataset):  # as of a notebook: no module holds it
        def __init__(self):
            self.lock = threading.Lock()  # cannot be pickled

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return index**2, os.getpid()

    def load():
        loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=2)
        numbers, processes = map(torch.cat, zip(*loader, strict=True))
        total = numbers.sum()
        dist.all_reduce(total)
        return total.item(), len({os.getpid(), *processes.tolist()})

    assert run_ranks(load, 2) == [(110, 3)] * 2


def test_peaks_of_ranks_are_metered():
    def step_on_rank():
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure(step, model=model, optimizer=optimizer)

    found = run_ranks(step_on_rank, 2)
    assert found[0].peak_bytes == found[1].peak_bytes > 4 * 64 * 65 * 4
    assert found[0].step_seconds


def test_memory_of_a_rank():
    def train():
        me = psutil.Process()
        dist.all_reduce(torch.ones(4))
        idle = me.memory_full_info().uss
        model = DistributedDataParallel(nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        return idle, me.memory_full_info().uss

    for idle, trained in run_ranks(train, 4):
        assert idle <= 25e6 and trained <= 40e6


def test_traffic_counts_payload_by_kind_and_type():
    def talk():
        with traffic() as sent:
            dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(7))
            dist.broadcast(torch.ones(3, dtype=torch.float64), 0)
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(2))
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))
            dist.barrier()
        dist.all_reduce(torch.ones(100))  # outside
        return sent

    (sent, *_) = run_ranks(talk, 4)
    rows = {(r.collective, r.axis, r.dtype): (r.calls, r.payload_bytes) for r in sent.rows}
    assert rows == {
        ("all-reduce", "world", "float32"): (2, 48),
        ("broadcast", "world", "float64"): (1, 24),
        ("all-gather", "world", "float32"): (1, 8),
        ("reduce-scatter", "world", "float32"): (1, 32),
    }
    assert sent.payload_bytes == 112 and "2 x all-reduce over world, 48 B" in str(sent)


def test_traffic_of_sends_and_of_groups():
    def talk():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = dist.get_rank()
        with traffic() as sent:
            dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
            if rank == 0:
                dist.send(torch.ones(6), 1)
            if rank == 1:
                dist.recv(torch.ones(6), 0)
        return [(row.collective, row.axis, row.payload_bytes) for row in sent.rows]

    zero, one, two, _ = run_ranks(talk, 4)
    assert zero[1] == ("send", "world", 24) and one[1] == ("receive", "world", 24)
    assert zero[0][0] == "all-reduce" and "tp" in zero[0][1] and len(two) == 1


def test_traffic_of_data_parallel_is_the_gradients():
    def train():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        wrapped = DistributedDataParallel(model)
        with traffic() as sent:
            wrapped(torch.randn(2, 8)).sum().backward()
        return sent.payload_bytes, sum(p.numel() * 4 for p in model.parameters())

    for sent, gradients in run_ranks(train, 2):
        assert sent == gradients


def test_what_the_parent_uses_is_loaded_before_ranks_start(monkeypatch):
    import wsgiref  # noqa: F401  (stands for a large library)

    monkeypatch.setitem(server.LIBRARIES, "wsgiref", ("wsgiref.handlers", "no.such.module"))

    def look():
        return "wsgiref.handlers" in sys.modules

    assert run_ranks(look, 2) == [True, True]


def test_traffic_needs_a_group():
    with pytest.raises(ValueError, match="worker of run_ranks"), traffic():
        pass


@pytest.mark.parametrize("world_size", [0, -1, 17])
def test_world_sizes_that_cannot_be(world_size):
    with pytest.raises(ValueError, match=f"world_size={world_size} .*1 to 16.*simulate"):
        run_ranks(add_up, world_size, 1)


def test_arguments_that_cannot_be():
    with pytest.raises(ValueError, match="function comes first"):
        run_ranks(add_up, "4")
    with pytest.raises(ValueError, match=r"run_ranks\(worker, 4\)"):
        run_ranks(4, add_up)
    with pytest.raises(ValueError, match="timeout_seconds= must be positive"):
        run_ranks(add_up, 2, 1, timeout_seconds=0)


def test_the_signature_is_documented():
    text = inspect.getdoc(run_ranks)
    assert all(name in text for name in inspect.signature(run_ranks).parameters)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files of this process and of ranks, which nobody else uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with server_of_torch():  # it, and what is forked from it, use the folder
        yield tmp_path


def add_up_with_a_file(x):
    with tempfile.NamedTemporaryFile() as file:
        return add_up(x), os.path.dirname(file.name)


def _launches(count, folder):
    expected = (6.0, str(folder))
    assert run_ranks(add_up_with_a_file, 4, 0) == [expected] * 4
    with nothing_left(folder):
        for number in range(count):
            assert run_ranks(add_up, 4, number) == [6.0 + 4 * number] * 4


def test_ten_launches_leave_nothing_behind(temporary):
    _launches(10, temporary)


@pytest.mark.slow
def test_two_hundred_launches_leave_nothing_behind(temporary):
    _launches(200, temporary)


def test_what_is_left_behind_is_seen(temporary):
    run_ranks(add_up, 1, 0)
    before = left(temporary)
    run_ranks(tempfile.mkdtemp, 1)
    pipe = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as process:
        found = left(temporary).beyond(before)
        process.kill()
    for end in pipe:
        os.close(end)
    assert len(found["files"]) == found["processes"] == 1 and found["descriptors"] > 2


@pytest.mark.parametrize(
    "launch",
    [
        lambda: run_ranks(add_up, 1, 0),
        lambda: run_hosts(add_up, 1),
        lambda: run_torchrun("script.py", 1),
        lambda: run_elastic("script.py"),
        lambda: run_killable(int, timeout_seconds=20),
    ],
    ids=["ranks", "hosts", "torchrun", "elastic", "check"],
)
def test_a_working_folder_that_is_gone(launch, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="working folder of this notebook has been deleted"):
        launch()
