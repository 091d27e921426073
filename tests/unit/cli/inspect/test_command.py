"""``quark inspect``: figures against the bytes of the files, for all kinds of checkpoints."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch.export.checkpoint.files import CheckpointReader


@pytest.fixture
def inspect(quark, monkeypatch):
    """What is found in a directory, without loading a tensor."""
    monkeypatch.setattr(CheckpointReader, "tensors", None)

    def inspect(path):
        result = quark("inspect", path, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return inspect


def edit(path, change):
    """Change the quantization_config of a checkpoint in place."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = change(config["quantization_config"])
    file.write_text(json.dumps(config))


def test_a_quantized_model(inspect, quantize):
    path, _ = quantize("--quant_scheme", "uint4_wo_32")
    found = inspect(path)
    stored = load_file(path / "model.safetensors")
    assert found["bytes"] == sum(t.nbytes for t in stored.values())
    assert (found["quant_method"], found["weight_format"]) == ("quark", "real_quantized")
    assert (found["model_type"], found["note"]) == ("llama", "")
    assert found["parameters"] == 2 * 2048 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64) + 5 * 32
    (row,) = found["schemes"]
    assert (row["layers"], row["weights"]) == (14, 2 * (4 * 32 * 32 + 3 * 32 * 64))
    assert row["scheme"]["weight"] == "uint4 per group 32 asym"
    assert row["bits_per_weight"] == found["bits_per_weight"] == 4 + 36 / 32
    assert [layer["name"] for layer in found["layers"]][:2] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
    ]


def test_a_float_model(inspect, model_dir):
    found = inspect(model_dir)
    assert (found["schemes"], found["layers"]) == ([], [])
    assert found["bits_per_weight"] is None
    assert "quant_method" not in found
    stored = load_file(model_dir / "model.safetensors")
    assert found["not_quantized"] == [
        {
            "dtype": "float32",
            "tensors": len(stored),
            "parameters": sum(t.numel() for t in stored.values()),
            "bytes": sum(t.nbytes for t in stored.values()),
        }
    ]


def test_tables(quark, quantize):
    flags = ["--quant_scheme", "fp8", "--kv_cache_dtype", "fp8"]
    path, _ = quantize(*flags, "--layer_quant_scheme", "*down_proj", "int4_wo_32")
    table = quark("inspect", path).stdout
    assert "int4 per group 32 sym" in table
    assert "kv cache" in table
    assert "not quantized: float32" in table
    assert "total" in table
    assert "model.layers.1.mlp.down_proj" not in table
    assert "model.layers.1.mlp.down_proj" in quark("inspect", path, "--layers").stdout


def test_the_table_of_a_float_model(quark, model_dir):
    table = quark("inspect", model_dir).stdout
    assert "(llama, not quantized)" in table
    assert "32.00" in table


def test_the_layout_of_version_0_8(inspect, quantize):
    """It had fewer keys, null for what is empty, and no version; 2-bit codes took 32 bits."""
    path, _ = quantize("--quant_scheme", "int2_wo_32")
    newer = ("block_size", "scale_format", "scale_calculation_mode", "is_scale_quant")
    newer += ("enable_buffer_reuse", "max_input_numel", "zero_point_type")

    def change(section):
        weight = section["global_quant_config"]["weight"]
        section["global_quant_config"]["weight"] = {
            key: value for key, value in weight.items() if key not in newer
        }
        kept = {k: v for k, v in section.items() if k not in ("version", "kv_cache_quant_config")}
        kept |= {"layer_quant_config": None, "layer_type_quant_config": None}
        return {k: v for k, v in kept.items() if k != "kv_cache_post_rope"}

    edit(path, change)
    file = path / "model.safetensors"
    stored = load_file(file)
    for name, tensor in stored.items():
        if f"{name}_scale" in stored or name.endswith("zero_point"):
            wide = (tensor.shape[0], tensor.shape[1] * 4)  # four codes in a byte
            stored[name] = torch.zeros(wide, dtype=torch.int32)
    save_file(stored, file)
    found = inspect(path)
    assert found["note"] == ""
    assert found["schemes"][0]["layers"] == 14
    assert found["bits_per_weight"] == 32 + 2
    assert found["quantized_weights"] == 2 * (4 * 32 * 32 + 3 * 32 * 64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda section: {"quant_method": "other", "bits": 4}, "'other' is unknown"),
        (lambda section: {**section, "unknown_key": 1}, "'unknown_key' is unknown"),
        (lambda section: {**section, "export": 3}, "expected an object"),
    ],
    ids=["other method", "unknown key", "damaged"],
)
def test_what_is_not_understood_is_noted(change, said, inspect, quark, quantize):
    path, _ = quantize("--quant_scheme", "int8_wo")
    edit(path, change)
    found = inspect(path)
    assert said in found["note"]
    assert found["schemes"] == []
    assert {row["dtype"] for row in found["not_quantized"]} == {"float32", "int8"}
    result = quark("inspect", path)
    assert result.exit_code == 0
    assert said in result.stderr
    assert "not quantized" not in result.stdout


def test_files_that_are_missing_or_damaged(refused, model_dir, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(model_dir, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged" in refused("inspect", path, code=1)
    file.unlink()
    assert "no *.safetensors files" in refused("inspect", path, code=1)
    (path / "config.json").write_text("[]")
    assert "does not describe a model" in refused("inspect", path, code=1)
