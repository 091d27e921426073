"""Files for other tools from the command line."""

import json

import pytest

FLAGS = ("--quant_scheme", "int4_wo_32")


@pytest.mark.parametrize("mode", ["awq", "gptq", "compressed-tensors"])
def test_layouts_of_other_tools(quantize, quark, mode):
    path, said = quantize(*FLAGS, "--custom_mode", mode)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == mode
    assert f"hf_format as {mode}" in " ".join(said.split()) and "size on disk" in said
    found = json.loads(quark("inspect", path, "--json").stdout)
    assert [scheme["layers"] for scheme in found["schemes"]] == [14]


def test_fp8(quantize):
    path, _ = quantize("--quant_scheme", "fp8", "--num_calib_data", 2, "--custom_mode", "fp8")
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["activation_scheme"]) == ("fp8", "static")


def test_gguf(quantize):
    gguf = pytest.importorskip("gguf")
    path, said = quantize(*FLAGS, "--model_export", "gguf")
    reader = gguf.GGUFReader(path / "model.gguf")
    kinds = {t.tensor_type.name for t in reader.tensors}
    assert "Q4_0" in kinds and "model.gguf" in said


def test_gguf_has_one_layout(refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS]
    said = refused("quantize", *place, "--model_export", "gguf", "--custom_mode", "awq")
    assert "a GGUF file has one layout" in said
