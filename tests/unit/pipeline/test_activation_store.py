"""Activations in memory and on disk."""

from pathlib import Path

import pytest
import torch

from quark.torch.pipeline.activation_store import ActivationStore

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
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 6 and sum(path.stat().st_size for path in files) == 2400
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell")
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
