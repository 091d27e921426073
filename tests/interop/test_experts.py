"""Checkpoints of mixture-of-experts models: their names, and every way back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from quark.torch import ModelImporter, load_params, save_params
from quark.torch.export import verify
from quark.torch.quantization.config.presets import scheme

SIZES = {"num_experts_per_tok": 2, "initializer_range": 0.3}
# Model -> its size, names of the tensors of expert 1 of layer 0 that its checkpoints have.
MODELS = {
    "mixtral": ({"num_local_experts": 4}, "block_sparse_moe.experts.1.", ("w1", "w2", "w3")),
    "qwen3_moe": (
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
        "mlp.experts.1.",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "head_dim": 16},
        "mlp.experts.1.",
        ("gate_up_proj", "down_proj"),
    ),
}
SCHEMES = ["int4_wo_32", "fp8", "ptpc_fp8", "mxfp4", "nvfp4", "int4_fp8"]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def moe(build):
    return lambda name, **more: build(name, **SIZES, **MODELS[name][0], **more)


def transformers(path):
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", MODELS)
class TestEveryWayBack:
    @pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
    @pytest.mark.parametrize("kind", SCHEMES)
    @pytest.mark.sampled(6)
    def test_is_exact(self, moe, quantize, export, logits, name, kind, weight_format):
        model = quantize(moe(name), kind)
        expected = logits(model)
        path = export(model, weight_format=weight_format)
        assert torch.equal(logits(transformers(path)), expected)
        empty = moe(name, device="meta")
        imported = ModelImporter(path, "safetensors").import_model_info(empty)
        assert torch.equal(logits(imported), expected)
        again = export(imported, weight_format=weight_format)
        assert (
            load_file(again / "model.safetensors").keys()
            == load_file(path / "model.safetensors").keys()
        )

    def test_parameters_alone(self, moe, quantize, logits, tmp_path, name):
        model = quantize(moe(name), "int8")
        save_params(model, "moe", export_dir=tmp_path / "out")
        loaded = load_params(
            moe(name), tmp_path / "out" / "moe.json", tmp_path / "out" / "moe.safetensors"
        )
        assert torch.equal(logits(loaded), logits(model))

    def test_stored_names(self, moe, quantize, export, name):
        path = export(quantize(moe(name), "fp8"))
        _, prefix, parts = MODELS[name]
        stored = load_file(path / "model.safetensors")
        for part in parts:
            key = f"model.layers.0.{prefix}{part}"
            assert stored[f"{key}.weight"].dtype == torch.float8_e4m3fn
            assert stored[f"{key}.weight_scale"].shape == stored[f"{key}.input_scale"].shape == ()

    def test_routers_are_named_as_excluded(self, moe, quantize, export, name):
        """They are linear layers elsewhere, which would look for their scales."""
        path = export(quantize(moe(name), "fp8"))
        exclude = json.loads((path / "config.json").read_text())["quantization_config"]["exclude"]
        stored = {n.removesuffix(".weight") for n in load_file(path / "model.safetensors")}
        routers = {n for n in stored if n.endswith(("gate", "router"))}
        assert len(routers) == 2 and routers <= set(exclude)


def test_float_experts_beside_quantized_layers(moe, quantize, export, logits, config_of):
    model = quantize(moe("mixtral"), config_of("int8_wo", ["lm_head", "*.experts*"]))
    path = export(model)
    assert torch.equal(logits(transformers(path)), logits(model))
    imported = ModelImporter(path, "safetensors").import_model_info(moe("mixtral"))
    assert torch.equal(logits(imported), logits(model))


def test_projections_left_in_float(moe, quantize, export, logits, config_of):
    model = quantize(moe("mixtral"), config_of("int8_wo", ["lm_head", "*.w2"]))
    path = export(model)
    assert torch.equal(logits(transformers(path)), logits(model))
    imported = ModelImporter(path, "safetensors").import_model_info(moe("mixtral", device="meta"))
    assert torch.equal(logits(imported), logits(model))


def test_an_expert_with_a_format_of_its_own(moe, quantize, export, logits, config_of):
    """Transformers merges experts, so it cannot hold them; that is said."""
    config = config_of("fp8", layer_quant_config={"*.experts.0.*": scheme("int8", 32)})
    model = quantize(moe("mixtral"), config)
    path = export(model)
    imported = ModelImporter(path, "safetensors").import_model_info(moe("mixtral"))
    assert torch.equal(logits(imported), logits(model))
    with pytest.raises(ValueError, match="different formats"):
        transformers(path)


@pytest.mark.client("compressed_tensors")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("usual", "of_experts"), [("int3_wo_32", "int4_wo_32"), ("fp8_wo", "int8_wo")]
)
def test_experts_with_another_scheme(
    moe, quantize, export, logits, config_of, name, usual, of_experts
):
    """In compressed-tensors, Transformers finds the scheme of all experts by an expression."""
    config = config_of(usual, layer_quant_config={"*.experts.*": scheme(of_experts, 32)})
    model = quantize(moe(name), config)
    path = export(model, custom_mode="compressed-tensors")
    torch.testing.assert_close(logits(transformers(path)), logits(model), rtol=0, atol=1e-4)
    imported = ModelImporter(path, "safetensors").import_model_info(moe(name, device="meta"))
    torch.testing.assert_close(logits(imported), logits(model), rtol=0, atol=1e-4)


@pytest.mark.client("compressed_tensors")
@pytest.mark.parametrize("kind", ["nvfp4", "int8"])
def test_experts_that_transformers_does_not_read_are_verified_here(moe, quantize, export, kind):
    """It would leave out the tensor scale of NVFP4, or end with an error."""
    path = export(model := quantize(moe("mixtral"), kind), custom_mode="compressed-tensors")
    assert verify(path, model).reader == "this package"
