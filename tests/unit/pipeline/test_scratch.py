"""Scratch files of changed weights are removed as soon as the system lets them go."""

from pathlib import Path

import torch

from quark.torch.pipeline.scratch import Scratch


def test_a_mapped_file_is_removed_by_a_later_sweep(tmp_path, monkeypatch):
    """As on Windows, which removes no file that a tensor maps."""
    scratch = Scratch(tmp_path)
    scratch.write({"a": torch.zeros(3)})

    def refuse(path, missing_ok=False):
        raise PermissionError(13, "The file is in use", str(path))

    with monkeypatch.context() as windows:
        windows.setattr(Path, "unlink", refuse)
        scratch.write({"a": torch.ones(3)})
    assert len(list(tmp_path.iterdir())) == 2
    scratch.write({"b": torch.ones(3)})
    assert len(list(tmp_path.iterdir())) == 2  # one for each tensor
    assert torch.equal(scratch.read(["a"])["a"], torch.ones(3))
    scratch.clear()
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_stay(tmp_path):
    scratch = Scratch(tmp_path / "own")
    (tmp_path / "own").mkdir()
    Scratch(tmp_path).write({"a": torch.zeros(3)})
    (file,) = tmp_path.glob("*.safetensors")
    scratch.refer(file, {"a": ("a", torch.zeros(3))})
    scratch.write({"a": torch.ones(3)})
    scratch.clear()
    assert file.exists()
    assert list((tmp_path / "own").iterdir()) == []
