"""CIFAR-10 from disk, from a server on this machine and generated; text from the library."""

import io
import pickle
import random
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from loopback import server
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

from utils.data import cifar10, docstring_pairs, normalize, text_batches, text_tokens
from utils.data.downloads import md5_of
from utils.data.generated import SHAPES, draw, read, write

TRAIN_FILES, TEST_FILES = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
SIZES = {"generated_train": 50, "generated_test": 20}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("CIFAR10_ROOT", raising=False)


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """A small archive in CIFAR-10's format, and torchvision's class with its checksums."""
    home = tmp_path_factory.mktemp("archive")
    folder = home / "cifar-10-batches-py"
    folder.mkdir()
    images, labels = draw(70, seed=7)
    sections = zip(
        TRAIN_FILES + TEST_FILES, [*np.split(np.arange(50), 5), range(50, 70)], strict=True
    )
    for name, part in sections:
        batch = {"data": images[part].reshape(len(part), -1), "labels": labels[part].tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(SHAPES)}, protocol=2))
    path = home / CIFAR10.filename
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    facts = {
        "tgz_md5": md5_of(path),
        "train_list": [[name, md5_of(folder / name)] for name in TRAIN_FILES],
        "test_list": [[name, md5_of(folder / name)] for name in TEST_FILES],
        "meta": {**CIFAR10.meta, "md5": md5_of(folder / "batches.meta")},
    }
    return path, type("SmallCifar10", (CIFAR10,), facts)


def test_cifar10_is_downloaded_once_and_then_read_from_disk(archive, tmp_path, monkeypatch, capsys):
    path, dataset = archive
    monkeypatch.setenv("COURSE_OFFLINE", "0")
    with server(path.read_bytes()) as (url, asked):
        monkeypatch.setattr(dataset, "url", url)
        train = cifar10("train", tmp_path, dataset=dataset)
        test = cifar10("test", tmp_path, dataset=dataset)
    assert asked == [None]
    assert (train.source, len(train), len(test)) == ("cifar-10", 50, 20)
    images, labels = draw(70, seed=7)
    assert torch.equal(train.images, torch.from_numpy(images[:50]))
    assert torch.equal(test.labels, torch.from_numpy(labels[50:]))
    assert train.classes == tuple(SHAPES) and capsys.readouterr().out == ""


def test_a_server_that_stops_leads_to_generated_images_and_a_reason(
    archive, tmp_path, monkeypatch, capsys
):
    path, dataset = archive
    monkeypatch.setenv("COURSE_OFFLINE", "")
    with server(path.read_bytes(), send=9000) as (url, _):
        monkeypatch.setattr(dataset, "url", url)
        assert cifar10("test", tmp_path, dataset=dataset, **SIZES).source == "generated"
    assert "transfer stopped at 8.79 KiB" in capsys.readouterr().out
    assert not (tmp_path / dataset.filename).exists()


def test_a_damaged_archive_is_named_and_nothing_unpacked(archive, tmp_path):
    path, dataset = archive
    (tmp_path / dataset.filename).write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=r"cifar-10-python.tar.gz is damaged.*Delete it"):
        cifar10("train", tmp_path, dataset=dataset)
    assert [entry.name for entry in tmp_path.iterdir()] == [dataset.filename]


@pytest.mark.parametrize("name", ["data_batch_3", "batches.meta"])
def test_a_damaged_batch_is_named(archive, tmp_path, name):
    path, dataset = archive
    (tmp_path / dataset.filename).write_bytes(path.read_bytes())
    cifar10("train", tmp_path, dataset=dataset)
    broken = tmp_path / dataset.base_folder / name
    broken.write_bytes(broken.read_bytes()[:-10])
    with pytest.raises(RuntimeError, match=f"{name} is damaged or missing. Delete the folder"):
        cifar10("test", tmp_path, dataset=dataset)


def test_offline_images_are_generated_said_so_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CIFAR10_ROOT", str(tmp_path))
    first = cifar10("train", **SIZES)
    printed = capsys.readouterr().out
    assert printed == (
        "Not CIFAR-10 but 50 generated train images of ten drawn shapes: COURSE_OFFLINE is set.\n"
    )
    assert first.images.shape == (50, 3, 32, 32) and first.images.dtype == torch.uint8
    assert first.labels.dtype == torch.int64 and first.labels.unique().tolist() == list(range(10))
    monkeypatch.setattr("utils.data.generated.draw", None)  # a second call must not draw again
    assert torch.equal(cifar10("train", **SIZES).images, first.images)
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_generated_file_is_named(tmp_path):
    whole = cifar10("test", tmp_path, **SIZES)
    file = next(tmp_path.rglob("test.npz"))
    good = file.read_bytes()
    dice = random.Random(0)
    refused = 0
    for attempt in range(200):
        broken = bytearray(good)
        places = (dice.randrange(len(good)), -dice.randrange(1, 600), dice.randrange(300))
        broken[places[attempt % 3]] ^= 1 << dice.randrange(8)
        file.write_bytes(broken)
        try:
            found = cifar10("test", tmp_path, **SIZES)
        except RuntimeError as error:
            assert "test.npz is damaged" in str(error) and "Delete the folder v2-50-20" in str(
                error
            )
            refused += 1
        else:  # a bit that nobody reads, such as a date
            assert torch.equal(found.images, whole.images)
            assert torch.equal(found.labels, whole.labels)
    assert refused > 100


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": np.zeros((20, 3, 32, 32), np.uint8)},
        {"images": np.zeros((20, 3, 32, 31), np.uint8), "labels": np.zeros(20, np.int64)},
        {"images": np.zeros((20, 3, 32, 32), np.float32), "labels": np.zeros(20, np.int64)},
        {"images": np.zeros((20, 3, 32, 32), np.uint8), "labels": np.full(20, 10)},
        {"images": np.zeros((20, 3, 32, 32), np.uint8), "labels": np.zeros((20, 1), np.int64)},
        b"",
        b"not an archive",
    ],
)
def test_a_wrong_generated_file_is_named(tmp_path, arrays):
    cifar10("test", tmp_path, **SIZES)
    file = next(tmp_path.rglob("test.npz"))
    if isinstance(arrays, bytes):
        file.write_bytes(arrays)
    else:
        np.savez(file, **arrays)
    with pytest.raises(RuntimeError, match=r"test\.npz is damaged.*Delete the folder"):
        cifar10("test", tmp_path, **SIZES)


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


@pytest.mark.parametrize("form", ["pickle", "array", "archive"])
def test_nothing_in_a_generated_file_is_run(tmp_path, form):
    cifar10("test", tmp_path, **SIZES)
    file, trace = next(tmp_path.rglob("test.npz")), tmp_path / "trace"
    planted = np.array([Planted(trace)], dtype=object)
    if form == "pickle":
        file.write_bytes(pickle.dumps(Planted(trace)))
    elif form == "array":
        np.savez(file, images=planted, labels=planted)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            for name in ("images.npy", "labels.npy"):
                content = io.BytesIO()
                np.save(content, planted, allow_pickle=True)
                archive.writestr(name, content.getvalue())
    with pytest.raises(RuntimeError, match="damaged"):
        cifar10("test", tmp_path, **SIZES)
    assert not trace.exists()


def test_generated_classes_can_be_learned_but_not_from_colour_alone():
    images, labels = (torch.from_numpy(array) for array in draw(2000, seed=3))
    assert torch.equal(images, torch.from_numpy(draw(2000, seed=3)[0]))
    assert not torch.equal(images, torch.from_numpy(draw(2000, seed=4)[0]))
    colours = normalize(images).mean(dim=(2, 3))
    nearest = torch.cdist(colours[1000:], colours[:1000]).argmin(dim=1)
    hits = (labels[:1000][nearest] == labels[1000:]).float().mean()
    assert 0.1 < hits < 0.4


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, split):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match=r"file/data cannot be used \(.*CIFAR10_ROOT"):
        cifar10(split, tmp_path / "file" / "data", **SIZES)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("utils.data.generated._write", full)
    with pytest.raises(RuntimeError, match="No space left on device"):
        cifar10("train", tmp_path, **SIZES)
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.startswith("v")]


def test_a_faster_process_s_folder_stays(tmp_path, monkeypatch):
    folder = tmp_path / "batches"
    real_draw = draw

    def slow(count, seed):
        monkeypatch.setattr("utils.data.generated.draw", real_draw)
        write(folder, 50, 20, seed=1)  # meanwhile, another process
        return real_draw(count, seed)

    monkeypatch.setattr("utils.data.generated.draw", slow)
    write(folder, 50, 20, seed=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["batches"]
    assert np.array_equal(read(folder, "test")[1], draw(70, seed=1)[1][50:])


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="'validation'; write 'train' or 'test'"):
        cifar10("validation", tmp_path)
    with pytest.raises(ValueError, match="10 images or more"):
        cifar10("test", tmp_path, generated_train=9)


def test_batches_cover_the_set_once_in_the_seed_s_order(tmp_path):
    data = cifar10("train", tmp_path, **SIZES)
    assert [len(labels) for _, labels in data.batches(16)] == [16, 16, 16, 2]
    assert [len(labels) for _, labels in data.batches(16, seed=1, drop_last=True)] == [16] * 3
    images, labels = (torch.cat(parts) for parts in zip(*data.batches(16), strict=True))
    assert torch.equal(labels, data.labels) and torch.equal(images, normalize(data.images))
    orders = [torch.cat([labels for _, labels in data.batches(7, seed=s)]) for s in (1, 1, 2)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].bincount(), data.labels.bincount())
    for size, drop_last in ((0, False), (51, True)):
        with pytest.raises(ValueError, match="choose 1 to 50"):
            data.batches(size, drop_last=drop_last)


def test_it_is_a_dataset_for_a_data_loader(tmp_path):
    data = cifar10("test", tmp_path, **SIZES)
    images, labels = next(iter(DataLoader(data, batch_size=20)))
    assert torch.equal(labels, data.labels)
    torch.testing.assert_close(images, normalize(data.images))


def test_text_is_the_library_s_and_always_the_same():
    tokens = text_tokens(30_000)
    assert tokens.dtype == torch.uint8 and tokens.shape == (30_000,)
    assert torch.equal(tokens[:10_000], text_tokens(10_000))
    assert "import" in bytes(tokens.tolist()).decode("utf-8", "replace")


def test_text_comes_in_order_of_name_without_tests(tmp_path):
    for name in ("b.py", "a.py", "pack/c.py", "test/d.py", "site-packages/e.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert bytes(text_tokens(17, tmp_path).tolist()) == b"a.pyb.pypack/c.py"
    with pytest.raises(ValueError, match="hold 17 bytes"):
        text_tokens(18, tmp_path)
    with pytest.raises(ValueError, match="ask for 1 or more"):
        text_tokens(0)


def test_targets_are_the_next_tokens():
    tokens = torch.arange(101, dtype=torch.uint8)
    batches = list(text_batches(tokens, batch=3, sequence=10, seed=5))
    assert len(batches) == 3  # ten windows, three to a batch
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert inputs.dtype == torch.int64 and torch.equal(targets, inputs + 1)
    assert len(inputs.unique()) == 90
    again = next(text_batches(tokens, batch=3, sequence=10, seed=5))[0]
    assert torch.equal(again, batches[0][0])


def test_too_little_text_for_a_batch():
    with pytest.raises(ValueError, match="ask text_tokens for 41 or more"):
        text_batches(torch.zeros(40, dtype=torch.uint8), batch=4, sequence=10)
    with pytest.raises(ValueError, match="must be 1 or more"):
        text_batches(torch.zeros(40, dtype=torch.uint8), batch=0, sequence=10)


def test_docstring_pairs_are_functions_with_what_they_say():
    pairs = docstring_pairs(40)
    assert len(pairs) == 40 and pairs == docstring_pairs(60)[:40]
    for prompt, answer in pairs:
        assert prompt.startswith("def ") and prompt.endswith("):\n")
        assert answer and "\n" not in answer


def test_docstring_pairs_that_cannot_be():
    with pytest.raises(ValueError, match="ask for 1 to 5,000"):
        docstring_pairs(0)
    with pytest.raises(ValueError, match="ask for 1 to 5,000"):
        docstring_pairs(10**6)
