"""Schemes with two levels of scales: layers that share an input share their tensor scales."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

SCHEME = "nvfp4_weight_only"


def tensors(path):
    return load_file(path / "model.safetensors")


def tensor_scales(stored):
    """Name of a layer -> its tensor scale."""
    end = ".weight_scale_2"
    return {n.removesuffix(end): t.item() for n, t in stored.items() if n.endswith(end)}


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("flags", [[], ["--weight_matrix_merge"]], ids=["scheme", "merge"])
def test_python_writes_the_same_tensors(flags, kind, quantize, request, tmp_path):
    model_dir = request.getfixturevalue(f"{kind}_dir" if kind == "bert" else "model_dir")
    ours, said = quantize("--quant_scheme", SCHEME, *flags, model=model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    config = LLMTemplate.get(kind).get_config(SCHEME)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    export_safetensors(model, tmp_path / "python")
    ours, theirs = tensors(ours), tensors(tmp_path / "python")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"{4 if kind == 'llama' else 2} groups of layers" in said


def test_tensor_scales_are_shared_by_input(quantize, bert_dir):
    scales = tensor_scales(tensors(quantize("--quant_scheme", SCHEME, model=bert_dir)[0]))
    block = "bert.encoder.layer.1.attention"
    (shared,) = {scales[f"{block}.self.{name}"] for name in ("query", "key", "value")}
    assert shared != scales[f"{block}.output.dense"]


def test_experts_without_tokens_share_too(quantize, mixtral_dir):
    stored = tensors(quantize("--quant_scheme", SCHEME, model=mixtral_dir)[0])
    scales = tensor_scales(stored)
    experts = [n.removesuffix("w1") for n in scales if ".experts." in n and n.endswith("w1")]
    assert len(experts) == 8
    assert all(scales[f"{expert}w1"] == scales[f"{expert}w3"] for expert in experts)
    assert any(scales[f"{expert}w1"] != scales[f"{expert}w2"] for expert in experts)


def test_no_layers_share_an_input(refused, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    place = ["--model_dir", tmp_path / "gpt2", "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", SCHEME, "--weight_matrix_merge", "--skip_evaluation"]
    assert "no layers of this model share an input" in refused("quantize", *place, *flags)
