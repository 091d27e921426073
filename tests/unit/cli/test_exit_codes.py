"""Exit codes of the verbs: 2 where another call is needed, 1 where files or the machine fail."""

import os
import shutil
import struct

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quark.cli.main import app
from tests.unit.export.gguf.rewriting import write_gguf

TEXT = ["--num_calib_data", 2]
# Verb -> a call, with CHECKPOINT for the model or checkpoint that it reads.
CALLS = {
    "quantize": ["--model_dir", "CHECKPOINT", "--output_dir", "OUT", "--quant_scheme", "int8_wo"],
    "sample": ["--model_dir", "CHECKPOINT", "--output", "out.jsonl", "--num_samples", 1],
    "collect": ["--model_dir", "CHECKPOINT", "--output_dir", "OUT", *TEXT],
    "search": ["--model_dir", "CHECKPOINT", "--target_bits", 6, "--output", "out.json"],
    "convert": ["CHECKPOINT", "OUT", "--to", "compressed-tensors"],
    "evaluate": ["CHECKPOINT", "--limit", 2],
    "compare": ["CHECKPOINT", "SOUND", "--output", "out.html", "--limit", 2],
    "report": ["CHECKPOINT", "--output", "out.html"],
    "inspect": ["CHECKPOINT"],
}


def without_config(path):
    (path / "config.json").unlink()


def empty(path):
    for file in path.iterdir():
        file.unlink()


def text_file(path):
    shutil.rmtree(path)
    path.write_text("no checkpoint", encoding="utf-8")


def cut(path):
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 10)


def no_header(path):
    (path / "model.safetensors").write_bytes(b"")


def no_weights(path):
    (path / "model.safetensors").unlink()


def half_a_config(path):
    (path / "config.json").write_text('{"model_type": ', encoding="utf-8")


WRONG = [shutil.rmtree, without_config, empty, text_file]
DAMAGED = [cut, no_header, no_weights, half_a_config]


@pytest.fixture(scope="module")
def sound(model_dir, tmp_path_factory):
    """A quantized checkpoint."""
    path = tmp_path_factory.mktemp("sound") / "int8"
    call = ["--model_dir", model_dir, "--output_dir", path, "--quant_scheme", "int8_wo"]
    result = CliRunner().invoke(app, ["quantize", *map(str, call), "--skip_evaluation"])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def place(sound, tmp_path, monkeypatch):
    """A directory with two copies of a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for name in ("SOUND", "CHECKPOINT"):
        shutil.copytree(sound, name)
    return tmp_path


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("damage", [*WRONG, *DAMAGED], ids=lambda function: function.__name__)
@pytest.mark.sampled(2, covers=True)
def test_codes(verb, damage, place, refused):
    before = set(place.iterdir())
    damage(place / "CHECKPOINT")
    said = refused(verb, *CALLS[verb], code=2 if damage in WRONG else 1)
    assert "CHECKPOINT" in said
    assert set(place.iterdir()) <= before, "a refused call has written something"


def test_an_algorithm_that_does_not_fit_the_model(model_dir, text, place, refused):
    call = ["--model_dir", model_dir, "--output_dir", "OUT", "--quant_scheme", "int4_wa_32"]
    call += ["--quant_algo", "svdquant", "--dataset", text, "--seq_len", 16, *TEXT]
    said = refused("quantize", *call, "--skip_evaluation", code=2)
    assert "svdquant: no linear layer" in said and "Set a smaller min_layer_size" in said


def test_a_weight_that_is_nan_is_named_before_the_evaluation(model_dir, text, place, refused):
    path = shutil.copytree(model_dir, "NAN") + "/model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, path, {"format": "pt"})
    call = ["--model_dir", "NAN", "--output_dir", "OUT", "--quant_scheme", "int4_wo_32"]
    call += ["--quant_algo", "gptq", "--dataset", text, "--eval_data", text, "--seq_len", 16]
    said = refused("quantize", *call, *TEXT, code=1)
    assert said.startswith("error: NAN: model.layers.1.mlp.down_proj.weight has NaN")


def end_missing(data, tensor):
    return data[:-1000]


def header_cut(data, tensor):
    return data[:500]


def other_magic(data, tensor):
    return b"GGML" + data[4:]


def beyond_the_end(data, tensor):
    """Put the last place of the file into the header of a tensor."""
    name = tensor.encode()
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    place += 4 + 8 * struct.unpack_from("<I", data, place)[0] + 4
    return data[:place] + struct.pack("<Q", len(data) // 32 * 32) + data[place + 8 :]


def other_name(data, tensor):
    return data.replace(tensor.encode(), tensor.encode()[::-1])


@pytest.fixture(scope="module")
def files(sound, tmp_path_factory):
    """GGUF files of the checkpoint: with codes, and in float."""
    gguf, place = pytest.importorskip("gguf"), tmp_path_factory.mktemp("gguf")
    call = ["convert", sound, place / "codes", "--to", "gguf"]
    assert CliRunner().invoke(app, [*map(str, call)]).exit_code == 0
    (coded,) = (place / "codes").glob("*.gguf")
    kinds = {tensor.name: "F32" for tensor in gguf.GGUFReader(coded).tensors}
    write_gguf(place / "float.gguf", coded, kinds)
    return {"codes": coded, "float": place / "float.gguf"}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("kind", ["codes", "float"])
@pytest.mark.parametrize(
    "damage",
    [end_missing, header_cut, other_magic, beyond_the_end, other_name],
    ids=lambda function: function.__name__,
)
@pytest.mark.sampled(3, covers=True)
def test_a_damaged_gguf_file(verb, kind, damage, files, place, refused):
    """Only a float file that is not read further asks for another call."""
    shutil.rmtree("CHECKPOINT")
    data = damage(files[kind].read_bytes(), "blk.0.attn_q.weight")
    (place / "CHECKPOINT.gguf").write_bytes(data)
    call = [str(value).replace("CHECKPOINT", "CHECKPOINT.gguf") for value in CALLS[verb]]
    before = set(place.iterdir())
    needs_codes = verb in ("convert", "report") and kind == "float"
    if damage is other_name and verb == "inspect":
        return  # which lists the tensors of any file
    code = 2 if damage is other_name and needs_codes else 1
    said = refused(verb, *call, code=code)
    assert "CHECKPOINT.gguf" in said
    assert ("Quantize the model first" if code == 2 else "opy it again") in said
    assert set(place.iterdir()) == before, "a refused call has written something"


@pytest.mark.parametrize("kind", ["F32", "IQ4_XS"])
def test_a_file_without_codes(kind, place, refused):
    """Values of any GGUF file are read, and a conversion needs codes."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(place / "x.gguf", "llama")
    dtype = getattr(gguf.GGMLQuantizationType, kind)
    weight = np.zeros((2, 256), np.float32)
    if kind != "F32":
        weight = np.zeros((2, 136), np.uint8)  # a block of 256 weights a row
    writer.add_tensor("blk.0.attn_q.weight", weight, raw_dtype=dtype)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    said = refused("convert", "x.gguf", "OUT", "--to", "quark", code=2)
    values = "has blocks of which values alone are read"
    found = "is not a quantized checkpoint" if kind == "F32" else values
    assert f"x.gguf {found}. Quantize the model first" in said


def test_a_target_that_holds_the_source(place, refused):
    for target in ("CHECKPOINT", "."):
        call = ["CHECKPOINT", target, "--to", "compressed-tensors", "--overwrite"]
        assert "holds the checkpoint itself" in refused("convert", *call, code=2)
    assert (place / "CHECKPOINT" / "model.safetensors").is_file()


def test_a_conversion_to_what_it_is(model_dir, place, quark, refused):
    call = ["--model_dir", model_dir, "--output_dir", "G", "--quant_scheme", "q4_0"]
    assert quark("quantize", *call, "--skip_evaluation", "--model_export", "gguf").exit_code == 0
    assert "is a GGUF file already" in refused("convert", "G", "OUT", "--to", "gguf", code=2)


def test_statistics_that_nothing_reads(model_dir, text, place, quark, refused):
    """The advice is one that the command can follow."""
    call = ["--model_dir", model_dir, "--output_dir", "S", "--dataset", text, *TEXT]
    assert quark("collect", *call, "--seq_len", 16).exit_code == 0
    call = ["--model_dir", model_dir, "--quant_scheme", "int4_wo_32", "--statistics", "S"]
    said = refused("quantize", *call, "--skip_evaluation", code=2)
    assert "Leave the statistics out." in said and "dataloader" not in said
    for algorithm in ("qronos", "awq,gptq"):
        said = refused("quantize", *call, "--quant_algo", algorithm, "--skip_evaluation", code=2)
        assert "Leave the statistics out, and give data (dataloader, or --dataset)" in said


@pytest.mark.parametrize("verb", CALLS)
def test_a_wrong_flag(verb, place, refused):
    assert "No such option" in refused(verb, *CALLS[verb], "--no_such_flag")


@pytest.mark.parametrize("verb", ["quantize", "collect", "evaluate", "compare"])
def test_a_tokenizer(verb, place, refused):
    (place / "CHECKPOINT/tokenizer.json").write_text("{", encoding="utf-8")
    assert "no tokenizer that can be loaded" in refused(verb, *CALLS[verb], code=1)
    for file in (place / "CHECKPOINT").glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused(verb, *CALLS[verb])
