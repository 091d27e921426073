"""Digests of outputs: written by every container, in the format of sha256sum, and compared."""

import hashlib
import random
import shutil
import subprocess

import pytest
import torch
from torch import nn

from quark.demo.text import model_directory
from quark.torch import (
    ModelExporter,
    ModelImporter,
    collect_statistics,
    load_params,
    load_statistics,
    save_params,
    save_statistics,
)
from quark.torch.digests import DIGESTS, check_unchanged, compare_digests
from quark.torch.export.conversion import convert
from quark.torch.export.recognition import check_checkpoint, load_checkpoint

EDITS = 56


@pytest.fixture(scope="module")
def outputs(build, quantize, tmp_path_factory):
    """Write a model to each container, and return the directory by its name."""
    place, model = tmp_path_factory.mktemp("outputs"), quantize(build(), "int8_wo")

    def outputs(kind):
        path = place / kind
        exporter = ModelExporter(path)
        if path.exists():
            pass
        elif kind == "sharded":
            exporter.export_safetensors_model(model, max_shard_size="40KB")
        elif kind == "native":
            exporter.export_quark_model(model)
        elif kind == "params":
            save_params(model, "llama", export_dir=path)
        elif kind == "converted":
            convert(outputs("sharded"), path, "compressed-tensors")
        elif kind == "onnx":
            pytest.importorskip("onnxscript")
            small = quantize(nn.Sequential(nn.Linear(8, 8)), "int8_wo")
            exporter.export_onnx_model(small, torch.ones(2, 8))
        elif kind == "gguf":
            pytest.importorskip("gguf")
            large = quantize(build(vocab_size=2048), "int8_wo")
            exporter.export_gguf_model(large, model_directory(), "model")
        return path

    return outputs


@pytest.fixture
def copied(outputs, tmp_path):
    def copied(kind):
        return shutil.copytree(outputs(kind), tmp_path / kind)

    return copied


@pytest.mark.parametrize("kind", ["sharded", "native", "params", "converted", "gguf", "onnx"])
def test_every_file_is_listed_as_sha256sum_does(outputs, kind):
    path = outputs(kind)
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(path.iterdir())
        if file.name != DIGESTS
    ]
    assert (path / DIGESTS).read_bytes().decode() == "".join(lines)
    assert set(compare_digests(path).values()) == {"ok"}
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", DIGESTS], cwd=path, check=True)


def test_every_edit_is_noticed(copied):
    """A bit flips in the data of a file: the headers stay sound."""
    path, chance = copied("sharded"), random.Random(0)
    files, noticed = sorted(path.glob("*.safetensors")), 0
    check_checkpoint(path, check_digests=True)  # which reads headers after the comparison
    for _ in range(EDITS):
        file = chance.choice(files)
        sound = file.read_bytes()
        start = 8 + int.from_bytes(sound[:8], "little")
        data = bytearray(sound)
        data[chance.randrange(start, len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"{file.name} has changed since it was written"):
            check_checkpoint(path, check_digests=True)
        noticed += 1
        file.write_bytes(sound)
    assert noticed == EDITS
    check_unchanged(path)


@pytest.mark.parametrize("kind", ["sharded", "native", "gguf"])
def test_loading_compares_before_tensors_are_read(copied, build, kind):
    path = copied(kind)
    load_checkpoint(path, check_digests=True)
    file = max(path.iterdir(), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    said = f"{file.name} has changed"
    with pytest.raises(ValueError, match=said):
        load_checkpoint(path, check_digests=True)
    with pytest.raises(ValueError, match=said):
        convert(path, path.parent / "other", "awq", check_digests=True)
    if kind != "gguf":
        with pytest.raises(ValueError, match=said):
            ModelImporter(path, check_digests=True).import_model_info(build(device="meta"))
    else:
        with pytest.raises(ValueError, match=said):
            load_checkpoint(file, check_digests=True)


def test_parameters_and_statistics_are_compared(copied, build, batches, tmp_path):
    path = copied("params")
    files = path / "llama.json", path / "llama.safetensors"
    load_params(None, *files, check_digests=True)
    save_statistics(collect_statistics(build(), batches, 0), tmp_path / "kept")
    load_statistics(tmp_path / "kept", check_digests=True)
    for file in (
        *files,
        tmp_path / "kept/statistics.json",
        tmp_path / "kept/statistics.safetensors",
    ):
        sound = file.read_bytes()
        changed = sound.replace(b"}", b" }") if file.suffix == ".json" else sound[:-1] + b"!"
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{file.name} has changed"):
            if file in files:
                load_params(None, *files, check_digests=True)
            else:
                load_statistics(tmp_path / "kept", check_digests=True)
        file.write_bytes(sound)
    (path / DIGESTS).unlink()
    with pytest.raises(FileNotFoundError, match="has no SHA256SUMS"):
        load_params(None, *files, check_digests=True)


def test_files_that_are_missing_or_not_listed(copied):
    path = copied("native")
    (path / "notes.txt").write_text("mine")
    check_unchanged(path)
    (path / "generation_config.json").unlink()
    assert compare_digests(path) == {
        "config.json": "ok",
        "generation_config.json": "missing",
        "model_state_dict.pth": "ok",
        "notes.txt": "not listed",
    }
    with pytest.raises(ValueError, match=r"generation_config.json is missing"):
        check_unchanged(path)
    with pytest.raises(ValueError, match=r"notes.txt is not listed in SHA256SUMS"):
        check_unchanged(path / "notes.txt")


def test_no_digests(copied):
    path = copied("sharded")
    (path / DIGESTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no SHA256SUMS: its files cannot be checked"):
        load_checkpoint(path, check_digests=True)


@pytest.mark.parametrize(
    "line",
    ["", "0" * 64, f"{'0' * 63}x  a", f"{'0' * 64}  ../../etc/passwd", f"{'0' * 64}  /etc/passwd"],
    ids=["empty", "no name", "no digest", "outside", "absolute"],
)
def test_a_damaged_list(copied, line):
    path = copied("native")
    (path / DIGESTS).write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1 is damaged"):
        check_unchanged(path)


def test_a_list_that_is_no_text(copied):
    path = copied("native")
    (path / DIGESTS).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is damaged"):
        check_unchanged(path)
