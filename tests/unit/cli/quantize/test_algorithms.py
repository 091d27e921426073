"""``quark quantize`` with algorithms: how they are named, their options, and what they change."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from quark.cli import models


def section(path):
    """The quantization_config of a checkpoint."""
    return json.loads((path / "config.json").read_text())["quantization_config"]


def tensors(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--quant_algo", "smoothquant,awq"], ["smoothquant", "awq"]),
        (["--quant_algo", "smoothquant awq"], ["smoothquant", "awq"]),
        (
            ["--quant-algo", "smoothquant, awq", "--quant_algo", "gptq"],
            ["smoothquant", "awq", "gptq"],
        ),
        (
            [
                *("--quant_algo", "awq", "--pre_quantization_optimization", "rotation"),
                *("--pre-quantization-optimization", "smoothquant"),
            ],
            ["rotation", "smoothquant", "awq"],
        ),
    ],
    ids=["commas", "spaces", "lists", "before"],
)
def test_algorithms_in_order(flags, names, request_of):
    assert request_of("--quant_scheme", "fp8", *flags).algorithms == names


@pytest.mark.parametrize(
    "flags",
    [
        ["--quant_algo_config_file", "awq", "a.json", "smooth", "b.json"],
        [
            "--quant-algo-config-file",
            "awq",
            "a.json",
            "--quant_algo_config_file",
            "smooth",
            "b.json",
        ],
        [
            *("--quant_algo_config_file_path", "awq", "--quant_algo_config_file", "a.json"),
            *(
                "--quant_algo_config_file",
                "smooth",
                "--pre_optimization_config_file_path",
                "b.json",
            ),
        ],
    ],
    ids=["pairs", "repeated", "earlier names"],
)
def test_files_of_options(flags, request_of):
    wanted = request_of("--quant_scheme", "fp8", *flags)
    assert wanted.quant_algo_config_file == ["awq", "a.json", "smooth", "b.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--quant_scheme", "fp8", "--quant_algo", "smothquant"], "Did you mean 'smoothquant'?"),
        (["--quant_scheme", "fp8", "--quant_algo", "svdquant,awq"], "awq follows svdquant"),
        (
            ["--quant_scheme", "int4_wo_32", "--quant_algo", "smoothquant"],
            "smooth applies to none of",
        ),
        (["--config", "x.json", "--quant_algo", "awq"], "the file of --config sets this"),
        (["--config", "x.json", "--quant_algo_config_file", "a"], "the file of --config sets"),
        (["--quant_scheme", "fp8", "--quant_algo_config_file", "a.json"], "there is no file 'a"),
        (["--quant_scheme", "fp8", "--quant_algo_config_file", "awq", "a"], "there is no file a"),
        (["--quant_scheme", "fp8", "--quant_algo_config_file", "awq=a"], "there is no file a"),
        (["--quant_scheme", "fp8", "--quant_algo_config_file"], "there is no file ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_the_model_is_loaded(flags, said, refused, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)  # would fail if it were called
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    assert said in refused("quantize", *place, *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["{file}", "smooth={file}", "smoothquant {file}"])
def test_an_algorithm_and_its_options(how, quantize, tmp_path):
    file = tmp_path / "smooth.json"
    file.write_text(json.dumps({"name": "smooth", "alpha": 0.25}))
    flags = ["--quant_algo_config_file", *how.format(file=file).split()]
    path, said = quantize("--quant_scheme", "int8", "--quant_algo", "smoothquant", *flags)
    assert re.search(r"algorithms +smooth *\n", said)
    (options,) = section(path)["algo_config"]
    assert (options["name"], options["alpha"]) == ("smooth", 0.25)
    plain = tensors(quantize("--quant_scheme", "int8")[0])
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(tensors(path)[name], plain[name])


def test_algorithms_ask_for_text_where_ranges_do_not(quantize):
    path, said = quantize("--quant_scheme", "uint4_wo_32", "--quant_algo", "awq")
    assert re.search(r"calibration +up to 128 windows", said)
    assert section(path)["algo_config"][0]["name"] == "awq"


def test_fixed_rotations_ask_for_no_text(quantize):
    path, said = quantize("--quant_scheme", "ptpc_int8", "--quant_algo", "rotation")
    assert "none needed" in said
    assert section(path)["algo_config"][0]["name"] == "rotation"


def test_the_documented_combination(quantize):
    """Int8 with an int8 cache, rotated and smoothed before."""
    path, _ = quantize(
        *("--quant_scheme", "w_int8_per_channel_a_int8_per_tensor_sym"),
        *("--kv_cache_dtype", "int8_per_tensor_static"),
        *("--pre_quantization_optimization", "rotation"),
        *("--pre_quantization_optimization", "smoothquant"),
        *("--num_calib_data", 8, "--model_export", "hf_format"),
    )
    assert [one["name"] for one in section(path)["algo_config"]] == ["rotation", "smooth"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--quant_algo_config_file", "{file}"], "smooth is not applied. Add --quant_algo smo"),
        (["--quant_algo", "awq", "--quant_algo_config_file", "awq={file}"], "options of smooth, "),
        (["--quant_algo", "smooth", "--quant_algo_config_file", "smoth", "{file}"], "'smooth'?"),
        (["--quant_algo", "smooth", "--quant_algo_config_file", "{file}"], "got 2"),
    ],
    ids=["not asked for", "of another", "name", "option"],
)
def test_options_that_cannot_be(flags, said, refused, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)
    file = tmp_path / "smooth.json"
    alpha = 2 if said == "got 2" else 0.5
    file.write_text(json.dumps({"name": "smooth", "alpha": alpha}))
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--quant_scheme", "int8"]
    assert said in refused("quantize", *place, *(flag.format(file=file) for flag in flags))
