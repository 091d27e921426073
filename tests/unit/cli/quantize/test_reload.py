"""``quark quantize`` on what is quantized already, and several outputs of one run."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quark.torch.digests import DIGESTS, compare_digests


def tensors(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("written", ["hf_format", "quark_format"])
def test_a_reloaded_model_is_written_again(written, quantize, quark, model_dir, tmp_path):
    first, _ = quantize("--quant_scheme", "int4_wo_32", "--model_export", written)
    place = ["--model_dir", model_dir, "--model_reload", "--import_model_dir", first]
    flags = ["--output_dir", tmp_path / "again", "--model_export", "hf_format", "--skip_evaluation"]
    result = quark("quantize", *place, *flags)
    assert result.exit_code == 0, result.output
    expected = tensors(quantize("--quant_scheme", "int4_wo_32")[0])
    found = tensors(tmp_path / "again")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_several_formats_in_one_directory(quantize):
    pytest.importorskip("gguf")
    formats = ["--model_export", "hf_format", "--model_export", "gguf"]
    path, said = quantize("--quant_scheme", "int4_wo_32", *formats)
    names = {file.name for file in path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "model.gguf"}
    assert not any(file.is_dir() for file in path.iterdir())
    assert set(compare_digests(path)) == names - {DIGESTS}
    assert set(compare_digests(path).values()) == {"ok"}
    assert "from_pretrained(" in said and "model.gguf" in said


def test_parameters_beside_a_checkpoint(quantize, tmp_path):
    flags = ["--params_save", "--save_dir", tmp_path / "params"]
    path, _ = quantize("--quant_scheme", "int8_wo", *flags)
    described = json.loads((tmp_path / "params" / "llama.json").read_text())
    assert described["config"]["model_type"] == "llama"
    assert (path / "model.safetensors").is_file()


def test_flags_without_effect_are_named(quark, quantize, model_dir, text):
    path, _ = quantize("--quant_scheme", "int8_wo")
    place = ["--model_dir", model_dir, "--model_reload", "--import_model_dir", path]
    flags = ["--quant_scheme", "int8_wo", "--num_calib_data", 3, "--eval_data", text]
    result = quark("quantize", *place, *flags)
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert said == [
        f"warning: --{name} has no effect: nothing is quantized."
        for name in ("num_calib_data", "quant_scheme")
    ]


SCHEME = ["--quant_scheme", "int8_wo"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_reload", "--params_load"], "conflicts with --model_reload"),
        (["--params_load"], "expected a file of --params_save"),
        (
            ["--skip_quantization", "--model_export", "hf_format"],
            "a float model cannot be exported",
        ),
        (["--skip_quantization", "--params_save"], "a float model cannot be exported"),
        (["--skip_quantization", "--skip_evaluation"], "nothing is left to do"),
        ([*SCHEME, "--import_model_dir", "x"], "needs --model_reload"),
        (["--model_reload", "--import_model_dir", "gone"], "there is no directory gone"),
        (
            [*SCHEME, "--model_export", "hf_format", "--model_export", "quark_format"],
            "run twice",
        ),
        ([*SCHEME, "--kv_cache_post_rope"], "only with --kv_cache_dtype"),
        ([*SCHEME, "--group_size_per_layer", "lm_head"], "a pattern and a number"),
        ([*SCHEME, "--group_size_per_layer", "lm_head", "x"], "a pattern and a number"),
        ([*SCHEME, "--group_size_per_layer", "lm_head", "32"], "int8_wo has no groups"),
        ([*SCHEME, "--scale_format", "float32"], "int8_wo fixes it"),
        ([*SCHEME, "--scale_calculation_mode", "ceil"], "int8_wo fixes it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(flags, said, refused, model_dir):
    assert said in refused("quantize", "--model_dir", model_dir, *flags)


def test_a_reloaded_model_is_not_overwritten(refused, quantize, model_dir):
    path, _ = quantize("--quant_scheme", "int8_wo")
    place = ["--model_dir", model_dir, "--model_reload", "--output_dir", path, "--overwrite"]
    said = refused("quantize", *place, "--model_export", "quark_format")
    assert "contains the model" in said


@pytest.mark.parametrize(
    ("scheme", "flags", "specs"),
    [
        (
            "w_fp4_per_group",
            ["--group_size", 32, "--scale_format", "e4m3"],
            {"scale_format": "e4m3"},
        ),
        ("mxfp4", ["--scale_calculation_mode", "floor"], {"scale_calculation_mode": "floor"}),
    ],
)
def test_scales_that_are_asked_for(scheme, flags, specs, quantize):
    path, _ = quantize("--quant_scheme", scheme, *flags)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    weight = section["global_quant_config"]["weight"]
    assert {name: weight[name] for name in specs} == specs


def test_group_sizes_of_layers(quantize):
    flags = ["--group_size", 32, "--group_size_per_layer", "*down_proj", 16]
    stored = tensors(quantize("--quant_scheme", "w_int4_per_group_sym", *flags)[0])
    groups = {
        name.split(".")[-2]: t.shape[0]
        for name, t in stored.items()
        if ".mlp." in name and name.endswith("weight_scale")
    }
    assert groups == {"gate_proj": 1, "up_proj": 1, "down_proj": 4}


def test_a_model_of_the_hub(quark, model_dir, text, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, revision, ignore_patterns):
        asked.append((name, revision))
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    place = ["--model_dir", "owner/name", "--revision", "main", "--output_dir", tmp_path / "out"]
    result = quark("quantize", *place, "--quant_scheme", "int8_wo", "--skip_evaluation")
    assert result.exit_code == 0, result.output
    assert asked == [("owner/name", "main")]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_model_that_is_nowhere(refused, monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise OSError("offline\nmore of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    said = refused("quantize", "--model_dir", "owner/name", "--quant_scheme", "fp8")
    assert "no directory owner/name" in said and "(offline)" in said
