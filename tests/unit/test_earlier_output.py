"""What --overwrite may replace: directories that hold an earlier output and nothing else."""

import json
import struct

import pytest

from quark.torch.earlier_output import foreign_names
from quark.torch.files import check_vacant, fresh_directory

QUANTIZED = json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})
FLOAT = json.dumps({"model_type": "llama"})
GGUF = b"GGUF\3\0\0\0general.quantized_by" + struct.pack("<IQ", 8, 5) + b"Quark"
TOKENIZER = {"tokenizer.json": "", "tokenizer_config.json": "", "special_tokens_map.json": ""}
SHARDS = {f"model-0000{n}-of-00002.safetensors": "" for n in (1, 2)}
OURS = {
    "safetensors": {"config.json": QUANTIZED, "model.safetensors": "", **TOKENIZER},
    "shards": {"config.json": QUANTIZED, **SHARDS, "model.safetensors.index.json": ""},
    "native": {"config.json": QUANTIZED, "model_state_dict.pth": ""},
    "gguf": {"llama.gguf": GGUF},
    "onnx": {"quark_model.onnx": "", "quark_model.onnx.data": ""},
    "two": {"config.json": QUANTIZED, "model.safetensors": "", "quark_model.onnx": ""},
    "statistics": {"statistics.json": '{"layout": 3}', "statistics.safetensors": ""},
    "parameters": {"llama.json": '{"structure": {}}', "llama.safetensors": ""},
}
# Files -> those that are foreign among them
FOREIGN = {
    "project": ({"setup.py": "", "data.csv": "", ".git": ""}, [".git", "data.csv", "setup.py"]),
    "beside": ({**OURS["safetensors"], "notes.txt": "mine"}, ["notes.txt"]),
    "float": (
        {"config.json": FLOAT, "model.safetensors": ""},
        ["config.json", "model.safetensors"],
    ),
    "settings": ({"config.json": '{"theme": "dark"}'}, ["config.json"]),
    "no json": ({"config.json": "{"}, ["config.json"]),
    "adapter": (
        {"config.json": QUANTIZED, "adapter_model.safetensors": ""},
        ["adapter_model.safetensors"],
    ),
    "downloaded": ({"llama-Q4_K.gguf": b"GGUF\3\0\0\0"}, ["llama-Q4_K.gguf"]),
    "second": ({"a.gguf": GGUF, "b.gguf": b"GGUF"}, ["a.gguf", "b.gguf"]),
    "checkpoint and data": ({**OURS["native"], "llama.json": "[]"}, ["llama.json"]),
}


def fill(directory, files):
    directory.mkdir(parents=True)
    for name, content in files.items():
        write = (directory / name).write_bytes if isinstance(content, bytes) else None
        (write or (directory / name).write_text)(content)
    return directory


@pytest.mark.parametrize("files", OURS.values(), ids=OURS)
def test_an_earlier_output_is_replaced(tmp_path, files):
    target = fill(tmp_path / "out", files)
    check_vacant(target, overwrite=True)
    with fresh_directory(target, overwrite=True) as directory:
        (directory / "config.json").touch()
    assert {path.name for path in target.iterdir()} == {"config.json", "SHA256SUMS"}


@pytest.mark.parametrize(("files", "foreign"), FOREIGN.values(), ids=FOREIGN)
def test_anything_else_is_refused_by_name(tmp_path, files, foreign):
    target = fill(tmp_path / "out", files)
    assert foreign_names(target) == foreign
    for write in (check_vacant, lambda path, overwrite: fresh_directory(path, True).__enter__()):
        with pytest.raises(FileExistsError, match=f"holds {foreign[0]}.*choose another directory"):
            write(target, overwrite=True)
    assert {path.name for path in target.iterdir()} == set(files)


def test_the_working_directory(tmp_path, monkeypatch):
    """``--output_dir .`` removed the files of the user."""
    fill(tmp_path / "project", {"thesis.tex": "years", "model.safetensors": ""})
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(FileExistsError, match=r"model\.safetensors, thesis\.tex"):
        check_vacant(".", overwrite=True)
    assert (tmp_path / "project" / "thesis.tex").read_text() == "years"


def test_a_directory_of_the_user_inside(tmp_path):
    target = fill(tmp_path / "out", OURS["safetensors"])
    (target / "runs").mkdir()
    assert foreign_names(target) == ["runs"]


def test_files_in_the_list_of_digests_are_known(tmp_path):
    target = fill(tmp_path / "out", {**OURS["safetensors"], "prompt.txt": "", "mine.txt": ""})
    lines = [f"{'0' * 64}  {name}\n" for name in ("config.json", "prompt.txt", "code/a.py")]
    (target / "SHA256SUMS").write_text("".join(lines))
    (target / "code").mkdir()
    assert foreign_names(target) == ["mine.txt"]


def test_such_a_list_alone_shows_nothing(tmp_path):
    target = fill(tmp_path / "out", {"config.json": FLOAT, "model.safetensors": ""})
    (target / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n{'0' * 64}  model.safetensors\n")
    assert len(foreign_names(target)) == 3
