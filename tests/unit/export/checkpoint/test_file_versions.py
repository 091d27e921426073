"""A checkpoint that another process replaces while it is read is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors import safe_open

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export import file_to_file
from quark.torch.export.checkpoint.file_versions import unchanged
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.conversion import convert
from quark.torch.export.recognition import load_checkpoint, load_in_float, open_checkpoint
from tests.configurations import config, groups

SAID = "has changed while the checkpoint was read"


@pytest.fixture
def two(build, quantize, tmp_path):
    """Two checkpoints of the same tensors in name, shape and type; the second is later."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(paths):
        model = build()
        with torch.no_grad():
            model.model.norm.weight += seed
        model = quantize(model, config(groups("int4")))
        ModelExporter(path).export_safetensors_model(model, max_shard_size="40kB")
        for file in path.iterdir():
            os.utime(file, (seed + 1, seed + 1))
    return paths


def replace(first, second):
    """Replace a directory by another, as ``--overwrite`` does."""
    first.rename(first.with_name("old"))
    shutil.copytree(second, first)


def read_stream(path):
    model = load_checkpoint(path, max_memory=1 << 40)
    with torch.no_grad():
        model(torch.tensor([[3, 4]]))


READERS = {
    "in memory": load_checkpoint,
    "in parts": read_stream,
    "in float": load_in_float,
    "to files": lambda path: file_to_file.quantize_files(
        config(groups("int8")), path, path.with_name("out"), ExportSettings()
    ),
    "converted": lambda path: convert(path, path.with_name("out"), "awq"),
}


def watch(patch, path, act):
    """Call a function before each opening of a file of safetensors in a directory."""

    def open_file(file, framework):
        if Path(file).parent == path:
            act()
        return safe_open(file, framework)

    patch.setattr(safetensors, "safe_open", open_file)


@pytest.mark.parametrize("reader", READERS)
def test_replaced_before_an_opening(two, reader, monkeypatch):
    """Of the first, of some in between, and of the last file that is opened."""
    first = two[0]
    read, openings = READERS[reader], []
    with monkeypatch.context() as patch:
        watch(patch, first, lambda: openings.append(0))
        read(first)
    for place in {0, 1, len(openings) // 2, len(openings) - 1}:
        turn = iter(range(len(openings)))
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=SAID):
            shutil.rmtree(first.with_name("out"), ignore_errors=True)
            watch(patch, first, lambda at=place, turn=turn: next(turn) == at and replace(*two))
            read(first)
        assert not first.with_name("out").exists()
        shutil.rmtree(first)
        first.with_name("old").rename(first)


def test_the_configuration_alone(two, monkeypatch):
    """Codes of one model must not meet the settings of another."""
    first, second = two
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=SAID):
        watch(patch, first, lambda: shutil.copy2(second / "config.json", first))
        load_checkpoint(first)


def test_a_file_that_changes_between_opening_and_reading(two):
    first, second = two
    loading = open_checkpoint(first)
    replace(first, second)
    with pytest.raises(ValueError, match=SAID):
        loading.fill()


def test_gguf(build, quantize, tmp_path):
    model = quantize(build(vocab_size=2048), config(groups("int4")))
    ModelExporter(tmp_path).export_gguf_model(model, model_directory(), "model")
    loading = open_checkpoint(tmp_path / "model.gguf")
    os.utime(tmp_path / "model.gguf", (1, 1))
    with pytest.raises(ValueError, match=SAID):
        loading.fill()


def test_other_files_may_change(two):
    first, _ = two
    with unchanged(first):
        (first / "log.txt").write_text("more")
        (first / "tokenizer.json").write_text("{}")
    load_checkpoint(first)


def test_an_error_of_the_work_stays(two):
    with pytest.raises(ValueError, match="another"), unchanged(two[0]):
        raise ValueError("another")
    with pytest.raises(ValueError, match=SAID) as error, unchanged(two[0]):
        (two[0] / "config.json").write_text(json.dumps({}))
        raise ValueError("does not fit")
    assert str(error.value.__cause__) == "does not fit"


def test_a_directory_that_disappears(two):
    reader = CheckpointReader(two[0])
    shutil.rmtree(two[0])
    with pytest.raises(ValueError, match=SAID):
        next(reader.tensors())
