"""Files: all or nothing is written, and nothing a file says is trusted."""

import errno
import json
import os
import pickle
import struct
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import files, replacement
from quark.torch.digests import DIGESTS
from quark.torch.export.checkpoint.files import (
    CheckpointReader,
    NativeReader,
    TensorHeader,
)
from quark.torch.export.checkpoint.shards import write_tensors
from quark.torch.files import check_vacant, fresh_directory, read_json, size_of


def tree(path):
    """Everything below a directory: relative name to content."""
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_bytes() for p in files if p.name != DIGESTS}


FILE = "model_state_dict.pth"  # of an output that may be replaced


class TestFreshDirectory:
    def write(self, path, content="new", **options):
        with fresh_directory(path, **options) as directory:
            assert directory.parent == path.resolve().parent  # renaming stays on one disk
            (directory / FILE).write_text(content)

    def test_new(self, tmp_path):
        self.write(tmp_path / "a" / "b")
        assert tree(tmp_path) == {f"a/b/{FILE}": b"new"}
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755

    def test_an_empty_directory_is_taken(self, tmp_path):
        (tmp_path / "out").mkdir()
        self.write(tmp_path / "out")
        assert tree(tmp_path) == {f"out/{FILE}": b"new"}

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_file_is_never_replaced(self, tmp_path, overwrite):
        (tmp_path / "out").write_text("kept")
        with pytest.raises(FileExistsError, match="out is a file: choose another name"):
            self.write(tmp_path / "out", overwrite=overwrite)
        assert tree(tmp_path) == {"out": b"kept"}

    def test_a_directory_in_use_is_replaced_only_if_told(self, tmp_path):
        self.write(tmp_path / "out", "old")
        (tmp_path / "out" / "config.json").write_text("old")
        with pytest.raises(FileExistsError, match="remove it, or pass overwrite=True"):
            self.write(tmp_path / "out")
        assert tree(tmp_path) == {f"out/{FILE}": b"old", "out/config.json": b"old"}
        self.write(tmp_path / "out", overwrite=True)
        assert tree(tmp_path) == {f"out/{FILE}": b"new"}
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_nothing_is_left_of_a_failure(self, tmp_path, error, overwrite):
        if overwrite:
            self.write(tmp_path / "out", "old")
        before = tree(tmp_path)
        with (
            pytest.raises(error),
            fresh_directory(tmp_path / "out", overwrite=overwrite) as directory,
        ):
            (directory / FILE).write_text("half")
            raise error
        assert tree(tmp_path) == before
        assert [p.name for p in tmp_path.iterdir()] == ["out"] * overwrite

    def test_the_old_directory_returns_if_the_new_one_cannot_be_placed(self, tmp_path, monkeypatch):
        self.write(tmp_path / "out", "old")
        rename = Path.rename

        def fail(self, target):
            if ".partial-" in self.name:
                raise OSError(errno.EIO, "no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
        monkeypatch.setattr(replacement, "_exchange", lambda first, second: False)
        with pytest.raises(OSError, match="no"):
            self.write(tmp_path / "out", overwrite=True)
        assert tree(tmp_path) == {f"out/{FILE}": b"old"}
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_too_little_room_is_seen_before_anything_is_written(self, tmp_path, monkeypatch):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(9e9, 6e9, 3e9))
        with pytest.raises(OSError, match=r"has 3 GB free, but 3\.5 GB will be written: make"):
            self.write(tmp_path / "out", needed=int(3.5e9))
        assert not list(tmp_path.iterdir())
        self.write(tmp_path / "out", needed=int(3e9))

    def test_a_relative_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.write(Path("out"))
        assert tree(tmp_path) == {f"out/{FILE}": b"new"}

    def test_check_vacant(self, tmp_path):
        check_vacant(tmp_path / "missing")
        check_vacant(tmp_path)
        (tmp_path / FILE).touch()
        check_vacant(tmp_path, overwrite=True)
        with pytest.raises(FileExistsError):
            check_vacant(tmp_path)


TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.int8).view(3, 4),
    "a.scale": torch.tensor(0.5),
    "b.weight": torch.randn(10, 10).to(torch.float8_e4m3fn),
    "c.weight": torch.randn(8, 4).bfloat16().t(),  # not contiguous
}


def read(directory, file=None):
    return dict(CheckpointReader(directory, file).tensors())


class TestTensors:
    def test_one_file(self, tmp_path):
        write_tensors(TENSORS, tmp_path, "5GB")
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
        found = read(tmp_path)
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].float(), tensor.float())
        entries = CheckpointReader(tmp_path).entries
        expected = TensorHeader("model.safetensors", (10, 10), torch.float8_e4m3fn)
        assert entries["b.weight"] == expected and expected.nbytes == 100
        assert entries["a.scale"].shape == ()

    def test_shards_and_their_index(self, tmp_path):
        write_tensors(TENSORS, tmp_path, 100)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == TENSORS.keys()
        assert index["metadata"]["total_size"] == size_of(TENSORS) == 12 + 4 + 100 + 64
        assert len(set(index["weight_map"].values())) == 3
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / file)
        assert {k: t.shape for k, t in read(tmp_path).items()} == {
            k: t.shape for k, t in TENSORS.items()
        }

    def test_files_of_any_name_without_an_index(self, tmp_path):
        save_file({"x": torch.ones(2)}, tmp_path / "one.safetensors")
        save_file({"y": torch.ones(3)}, tmp_path / "two.safetensors")
        assert read(tmp_path).keys() == {"x", "y"}
        assert read(tmp_path, "two.safetensors").keys() == {"y"}

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors files"):
            CheckpointReader(tmp_path)


class TestDamagedSafetensors:
    def damaged(self, tmp_path, content):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"model\.safetensors is damaged or not a safetensors file .*: copy or export it",
        ):
            CheckpointReader(tmp_path)

    @pytest.mark.parametrize("keep", [0, 4, 30, -1], ids=["empty", "length", "header", "last_byte"])
    def test_truncated(self, tmp_path, keep):
        write_tensors(TENSORS, tmp_path, "5GB")
        self.damaged(tmp_path, (tmp_path / "model.safetensors").read_bytes()[:keep])

    @pytest.mark.parametrize(
        "content",
        [
            b"hello",
            struct.pack("<Q", 1 << 60) + b"{}",
            struct.pack("<Q", 2) + b"[]",
        ],
        ids=["text", "huge_header", "no_mapping"],
    )
    def test_something_else(self, tmp_path, content):
        self.damaged(tmp_path, content)

    def test_a_pointer_of_git_lfs(self, tmp_path):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
        (tmp_path / "model.safetensors").write_bytes(pointer)
        with pytest.raises(ValueError, match=r"is a pointer of Git LFS, .* run 'git lfs pull'"):
            CheckpointReader(tmp_path)

    def test_a_file_that_may_not_be_read(self, tmp_path, monkeypatch):
        """safetensors says that it is missing."""

        def open_file(path, framework):
            raise FileNotFoundError(path)

        (tmp_path / "model.safetensors").touch()
        monkeypatch.setattr("safetensors.safe_open", open_file)
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
        with pytest.raises(PermissionError, match="may not be read: change its permissions"):
            CheckpointReader(tmp_path)


class TestIndex:
    def index(self, tmp_path, content):
        write_tensors(TENSORS, tmp_path, 100)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "model.safetensors.index.json").write_text(text)

    def test_a_shard_is_missing(self, tmp_path):
        write_tensors(TENSORS, tmp_path, 100)
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(
            FileNotFoundError, match=r"lacks model-00002-of-00003\.safetensors, which"
        ):
            CheckpointReader(tmp_path)

    @pytest.mark.parametrize("absolute", [False, True])
    def test_names_that_lead_out_of_the_directory(self, tmp_path, absolute):
        outside = tmp_path / "secret.safetensors"
        save_file({"secret": torch.ones(1)}, outside)
        inside = tmp_path / "checkpoint"
        inside.mkdir()
        name = str(outside) if absolute else "../secret.safetensors"
        self.index(inside, {"weight_map": {"secret": name}})
        with pytest.raises(FileNotFoundError, match=r"checkpoint lacks .*secret\.safetensors"):
            CheckpointReader(inside)

    @pytest.mark.parametrize(
        "content",
        [{}, [], {"weight_map": ["a"]}, {"weight_map": {"a": 3}}],
        ids=["no_map", "list", "map_is_a_list", "number"],
    )
    def test_no_map(self, tmp_path, content):
        self.index(tmp_path, content)
        with pytest.raises(ValueError, match=r"index\.json has no weight_map of tensor names"):
            CheckpointReader(tmp_path)

    def test_not_json(self, tmp_path):
        self.index(tmp_path, "{")
        with pytest.raises(ValueError, match=r"index\.json is not valid JSON"):
            CheckpointReader(tmp_path)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestNative:
    def test_plain_tensors(self, tmp_path):
        torch.save(TENSORS, tmp_path / "model_state_dict.pth")
        reader = NativeReader(tmp_path)
        assert reader.entries["a.weight"].shape == (3, 4)
        assert torch.equal(dict(reader.tensors())["a.weight"], TENSORS["a.weight"])

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no model_state_dict\.pth"):
            NativeReader(tmp_path)

    @pytest.mark.parametrize("how", ["zip", "pickle"])
    def test_code_is_not_run(self, tmp_path, how):
        bad = {"a": Evil(tmp_path / "ran")}
        path = tmp_path / "model_state_dict.pth"
        if how == "zip":
            torch.save(bad, path)
        else:
            path.write_bytes(pickle.dumps(bad))
        with pytest.raises(ValueError, match="could run code and is never loaded"):
            NativeReader(tmp_path)
        assert not (tmp_path / "ran").exists()
        torch.load(path, weights_only=False) if how == "zip" else pickle.loads(path.read_bytes())
        assert (tmp_path / "ran").exists()  # it would have run

    @pytest.mark.parametrize(
        "content", [b"", b"hello", b"PK\x03\x04"], ids=["empty", "text", "zip"]
    )
    def test_damaged(self, tmp_path, content):
        (tmp_path / "model_state_dict.pth").write_bytes(content)
        with pytest.raises(ValueError, match=r"model_state_dict\.pth is damaged, or holds more"):
            NativeReader(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [torch.ones(2), [torch.ones(2)], {"a": 1}, None],
        ids=["tensor", "list", "int", "none"],
    )
    def test_no_state(self, tmp_path, content):
        torch.save(content, tmp_path / "model_state_dict.pth")
        with pytest.raises(ValueError, match="holds something other than tensors"):
            NativeReader(tmp_path)


class TestJson:
    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
            read_json(tmp_path / "config.json")

    @pytest.mark.parametrize("content", [b"{'a': 1}", b"\xff\xfe{}", b""])
    def test_damaged(self, tmp_path, content):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            read_json(tmp_path / "config.json")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes to compare")
def test_files_are_as_accessible_as_any_new_file(tmp_path):
    (tmp_path / "new").touch()
    expected = (tmp_path / "new").stat().st_mode & 0o777
    with fresh_directory(tmp_path / "out") as directory:
        write_tensors({"x": torch.ones(2)}, directory, "5GB")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == expected
    (tmp_path / "sub").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "sub").stat().st_mode
