"""The downloader against a server on this machine: whole, resumed, cut off, wrong, silent."""

import pytest
from loopback import PAYLOAD, server

from utils.data import DownloadError, download
from utils.data.downloads import md5_of


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def md5(tmp_path):
    whole = tmp_path / "whole"
    whole.write_bytes(PAYLOAD)
    return md5_of(whole)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "in" / "file.tar.gz"


def part_of(target):
    return target.with_name("file.tar.gz.part")


def test_a_whole_download(target, md5):
    with server() as (url, asked):
        download(url, target, md5)
    assert target.read_bytes() == PAYLOAD and asked == [None]
    assert not part_of(target).exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(target, md5, ranges):
    with server(send=100_000) as (url, _), pytest.raises(DownloadError, match=r"97.66 KiB"):
        download(url, target, md5)
    assert not target.exists() and part_of(target).stat().st_size == 100_000
    with server(ranges=ranges) as (url, asked):
        download(url, target, md5)
    assert asked == ["bytes=100000-"] and target.read_bytes() == PAYLOAD


def test_a_part_that_is_already_whole_is_only_checked(target, md5):
    target.parent.mkdir()
    part_of(target).write_bytes(PAYLOAD)
    with server() as (url, asked):
        download(url, target, md5)
    assert len(asked) == 1 and target.read_bytes() == PAYLOAD


@pytest.mark.parametrize("kept", [b"", b"not the beginning"])
def test_a_wrong_file_leaves_nothing(target, md5, kept):
    target.parent.mkdir()
    part_of(target).write_bytes(kept)
    with server(payload=b"<html>Please log in to this network</html>") as (url, _):
        with pytest.raises(DownloadError, match="127.0.0.1 sent is not the file"):
            download(url, target, md5)
    assert not list(target.parent.iterdir())


def test_a_silent_server_is_given_up_quickly(target, md5):
    with server(answers=False) as (url, _):
        with pytest.raises(DownloadError, match="no answer within 0.2 s"):
            download(url, target, md5, connect_seconds=0.2)
    assert not list(target.parent.iterdir())


def test_a_stalled_transfer_keeps_its_part(target, md5):
    with server(send=100_000, stalls=True) as (url, _):
        with pytest.raises(DownloadError, match="stopped at .* timed out; the next call goes on"):
            download(url, target, md5, stall_seconds=0.3)
    # Not all that was sent need have come, but what came is the file's beginning.
    assert PAYLOAD.startswith(part_of(target).read_bytes())


def test_no_server_at_all(target, md5):
    with server() as (url, _):
        pass
    with pytest.raises(DownloadError, match="127.0.0.1 did not answer .*refused"):
        download(url, target, md5)
