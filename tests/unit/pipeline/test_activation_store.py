"""Activations in memory and on disk."""

import errno
import os
from pathlib import Path

import pytest
import torch

from quark.torch.pipeline.activation_store import ActivationStore, offload_directory
from quark.torch.pipeline.temporary_directory import LOCK

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def made(dtype, *shape):
    return torch.randn(shape).mul_(9).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("limit", [0, 500, 1 << 20])
def test_what_goes_in_comes_out(dtype, limit):
    tensors = [made(dtype, 2, n, 8) for n in (3, 1, 5, 0)]
    with ActivationStore(limit) as store:
        for index, x in enumerate(tensors):
            store[index] = x
        assert len(store) == len(tensors)
        for index, x in enumerate(tensors):
            assert store[index].dtype == dtype and torch.equal(store[index], x)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_copies_are_kept(limit):
    x = made(torch.float32, 4, 4)
    with ActivationStore(limit) as store:
        store[0] = x
        before = x.clone()
        x.zero_()
        assert torch.equal(store[0], before)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_place_is_used_again(limit):
    with ActivationStore(limit) as store:
        store[0] = made(torch.float32, 4, 4)
        stored = store.tensors[0]
        second = made(torch.float32, 4, 4)
        store[0] = second
        assert store.tensors[0] is stored and torch.equal(store[0], second)
        wider = made(torch.float32, 2, 9)
        store[0] = wider
        assert torch.equal(store[0], wider)


def test_memory_stays_below_the_limit_and_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ActivationStore(limit=1000) as store:
        for index in range(8):
            store[index] = made(torch.float32, 100)  # 400 bytes
        files = stored_files(tmp_path)
        assert len(files) == 6 and sum(path.stat().st_size for path in files) == 2400
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell")
def test_a_tensor_in_use_stays_when_one_of_another_shape_replaces_it(tmp_path):
    with offload_directory(tmp_path), ActivationStore(limit=0) as store:
        store[0] = torch.arange(5000.0)
        used = store[0]
        store[0] = torch.zeros(3)
        assert used.tolist() == list(range(5000)) and store[0].tolist() == [0, 0, 0]
        (directory,) = tmp_path.iterdir()
        assert len(list(directory.glob("[0-9]*"))) == 1, "the old file is removed"


def test_what_waits_on_disk_takes_no_memory():
    with ActivationStore(limit=0) as store:
        for index in range(4):
            store[index] = made(torch.float32, 100)
        read = store[0]
        mapped = Path("/proc/self/maps").read_text().count("quark-activations-")
        assert mapped == 1 and len(read) == 100


def test_clearing_makes_room():
    with ActivationStore(limit=500) as store:
        for _ in range(3):
            store[0] = made(torch.float32, 100)
            store.clear()
            assert len(store) == 0
        store[0] = made(torch.float32, 100)
        assert store._directory is None


def stored_files(directory):
    return [path for path in directory.rglob("*") if path.is_file() and path.name != LOCK]


@pytest.mark.parametrize("by_the_system", [True, False])
def test_files_have_their_space_before_they_are_mapped(tmp_path, monkeypatch, by_the_system):
    """A mapped file without space on a full disk ends the process with SIGBUS."""
    if not by_the_system:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with offload_directory(tmp_path), ActivationStore(limit=0) as like:
        like[0] = made(torch.float32, 100_000)
        with ActivationStore(limit=0) as store:
            store.reserve(like)
            assert len(store) == 0 and len(stored_files(tmp_path)) == 2
            for file in stored_files(tmp_path):
                taken = file.stat()
                assert taken.st_size == 400_000
                assert not hasattr(taken, "st_blocks") or 512 * taken.st_blocks >= 400_000
            store[0] = like[0]
            assert len(store) == 1 and len(stored_files(tmp_path)) == 2


def test_a_full_disk_is_an_error_with_advice(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with offload_directory(tmp_path), ActivationStore(limit=0) as store:
        store[0] = made(torch.float32, 100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match=r"has no room.*--offload_dir") as error:
                store[1] = made(torch.float32, 1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.errno == errno.EFBIG
        assert str(tmp_path) in str(error.value) and len(store) == 1
        assert len(stored_files(tmp_path)) == 1


def test_places_are_used_by_the_next_tensors(tmp_path):
    with offload_directory(tmp_path), ActivationStore(limit=0) as store:
        store[0] = made(torch.float32, 100)
        file = store.tensors[0]
        store.recycle()
        assert len(store) == 0
        second = made(torch.float32, 100)
        store[0] = second
        assert store.tensors[0] is file and torch.equal(store[0], second)


def test_the_directory_of_the_user(tmp_path):
    with offload_directory(tmp_path), ActivationStore(limit=0) as store:
        store[0] = made(torch.float32, 100)
        assert len(stored_files(tmp_path)) == 1
    with ActivationStore(limit=0) as store:
        store[0] = made(torch.float32, 100)
        assert stored_files(tmp_path) == []
    with pytest.raises(NotADirectoryError, match="offload_dir"), offload_directory("gone"):
        pass
