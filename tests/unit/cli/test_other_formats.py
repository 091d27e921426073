"""Files for other tools from the command line."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from quark.torch.export.formats.registry import FORMATS
from quark.torch.quantization import Config, Int8PerTensorSpec, QuantizationConfig
from tests.models.architectures import build as build_architecture
from tests.models.architectures import small_config

FLAGS = ("--quant_scheme", "int4_wo_32")
SCHEMES = {"modelopt": "nvfp4_weight_only", "mxfp8": "mxfp8"}  # of formats without int4


@pytest.mark.parametrize(
    "mode", [name for name in FORMATS if name not in ("quark", "fp8", "mxfp4")]
)
def test_layouts_of_other_tools(quantize, quark, mode):
    path, said = quantize("--quant_scheme", SCHEMES.get(mode, "int4_wo_32"), "--custom_mode", mode)
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


@pytest.fixture
def shallow_dir(model_dir, tmp_path):
    """The model with one of its blocks: tracing a block takes seconds."""
    path = tmp_path / "shallow"
    LlamaForCausalLM.from_pretrained(model_dir, num_hidden_layers=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


def test_onnx(quantize, shallow_dir, onnx_operators):
    onnx = pytest.importorskip("onnx")
    is_verified = find_spec("onnxruntime") is not None
    verify = ["--verify"] if is_verified else []
    path, said = quantize(*FLAGS, "--model_export", "onnx", *verify, model=shallow_dir)
    graph = onnx.load(path / "quark_model.onnx").graph
    assert [i.name for i in graph.input] == ["input_ids", "attention_mask"]
    assert sum(n.op_type == "DequantizeLinear" for n in graph.node) == 7
    assert "onnxruntime.InferenceSession" in said
    assert ("verified: opened by onnxruntime" in said) == is_verified


def test_onnx_with_a_cache(quantize, refused, model_dir, shallow_dir, onnx_operators, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    path, _ = quantize(*FLAGS, "--model_export", "onnx", "--use_cache", model=shallow_dir)
    graph = onnx.load(path / "quark_model.onnx").graph
    names = {"past_key_values.0.key", "past_key_values.0.value"}
    assert names <= {i.name for i in graph.input}
    words = "Return the key."
    own, original = (AutoTokenizer.from_pretrained(place) for place in (path, model_dir))
    assert own(words)["input_ids"] == original(words)["input_ids"]
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS]
    assert "give --model_export onnx" in refused("quantize", *place, "--use_cache")


def test_a_model_without_keys_and_values_has_no_such_file(refused, tmp_path):
    pytest.importorskip("onnxscript")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64}
    sizes["time_step_rank"] = 32  # inputs of a layer, which groups of 32 divide
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path / "mamba")
    place = ["--model_dir", tmp_path / "mamba", "--output_dir", tmp_path / "out", *FLAGS]
    said = refused("quantize", *place, "--model_export", "onnx", "--use_cache")
    assert "MambaForCausalLM does not keep keys and values" in said


def test_a_model_whose_steps_depend_on_values_is_checked_when_it_is_loaded(
    refused, tmp_path, monkeypatch
):
    from quark.cli import models

    pytest.importorskip("onnxscript")
    model = build_architecture(small_config("reformer"), torch.float32)
    model.save_pretrained(tmp_path / "reformer")
    monkeypatch.setattr(models, "load_tokenizer", lambda *args: None)
    monkeypatch.setattr(models, "text_windows", None)  # fails if it is called
    place = ["--model_dir", tmp_path / "reformer", "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", "int8_wo", "--model_export", "onnx", "--use_cache"]
    said = refused("quantize", *place, *flags)
    assert "ReformerModelWithLMHead does not keep keys and values" in said


@pytest.mark.parametrize(("export", "file"), [("gguf", "a GGUF file"), ("onnx", "an ONNX file")])
def test_files_that_have_one_layout(refused, model_dir, tmp_path, export, file):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS]
    said = refused("quantize", *place, "--model_export", export, "--custom_mode", "awq")
    assert f"{file} has one layout" in said


def test_what_no_graph_computes(refused, model_dir, tmp_path):
    inputs = Int8PerTensorSpec(round_method="floor", is_dynamic=False).to_quantization_spec()
    config = Config(QuantizationConfig(input_tensors=inputs))
    (tmp_path / "floor.json").write_text(json.dumps(config.to_dict()))
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    said = refused(
        "quantize", *place, "--config", tmp_path / "floor.json", "--model_export", "onnx"
    )
    assert "--model_export" in said and "rounds half to even, not by floor" in said


def test_onnx_is_not_verified_without_a_runtime(refused, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.torch.export.onnx.runtime.find_spec", lambda name: None)
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS]
    said = refused("quantize", *place, "--model_export", "onnx", "--verify")
    assert "pip install onnxruntime" in said


@pytest.mark.parametrize("said_by", ["the command line", "the model"])
def test_onnx_is_not_verified_in_bfloat16(refused, model_dir, tmp_path, said_by):
    pytest.importorskip("onnxruntime")
    flags = ["--data_type", "bfloat16"]
    if said_by == "the model":
        model_dir, flags = shutil.copytree(model_dir, tmp_path / "model"), []
        described = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps({**described, "dtype": "bfloat16"}))
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS, *flags]
    said = refused("quantize", *place, "--model_export", "onnx", "--verify")
    assert "--verify: the model is in bfloat16" in said and not (tmp_path / "out").exists()
