"""MXFP4 as gpt-oss stores it: written by every way, and read by Transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer
from quark.torch.export import convert
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.pipeline.memory_limit import taken_memory
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.configurations import quantized

OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 32}
EXPERTS = "model.layers.0.mlp.experts"


def experts_alone(name="mxfp4_weight_only", *algorithms):
    layers = {"*.experts.*": scheme(name)}
    return Config(layer_quant_config=layers, algo_config=list(algorithms) or None)


@pytest.fixture
def oss(build):
    return lambda: build("gpt_oss", torch.bfloat16, **OSS)


@pytest.fixture
def written(export, oss):
    """A quantized model and its checkpoint."""
    model = quantized(oss(), experts_alone())
    return model, export(model, custom_mode="mxfp4")


def test_layout(written):
    _, path = written
    stored = load_file(path / "model.safetensors")
    shapes = {
        name.removeprefix(f"{EXPERTS}."): (tuple(t.shape), t.dtype)
        for name, t in stored.items()
        if name.startswith(EXPERTS)
    }
    assert shapes == {
        "gate_up_proj_blocks": ((4, 64, 2, 16), torch.uint8),
        "gate_up_proj_scales": ((4, 64, 2), torch.uint8),
        "gate_up_proj_bias": ((4, 64), torch.bfloat16),
        "down_proj_blocks": ((4, 64, 1, 16), torch.uint8),
        "down_proj_scales": ((4, 64, 1), torch.uint8),
        "down_proj_bias": ((4, 64), torch.bfloat16),
    }
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "mxfp4"
    assert "lm_head" in section["modules_to_not_convert"]
    assert not any("experts" in name for name in section["modules_to_not_convert"])


def test_transformers_dequantizes_the_same_values(written, logits):
    model, path = written
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    state = theirs.state_dict()
    for expert in range(4):
        for part in ("gate_up_proj", "down_proj"):
            weight = model.get_submodule(f"{EXPERTS}.{expert}.{part}").weight
            assert torch.equal(state[f"{EXPERTS}.{part}"][expert].T, weight), part
    expected, result = logits(model), logits(theirs)
    assert (result - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_model_comes_back(written, oss, logits):
    model, path = written
    assert torch.equal(logits(ModelImporter(path).import_model_info(oss())), logits(model))


def same_files(first, second):
    tensors = [load_file(path / "model.safetensors") for path in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[1][name], t) for name, t in tensors[0].items())


def test_every_way_writes_the_same(written, oss, tmp_path, logits):
    """From files to files, a model larger than memory, and a conversion of single experts."""
    _, expected = written
    oss().save_pretrained(tmp_path / "float")
    ModelQuantizer(experts_alone()).direct_quantize_checkpoint(
        tmp_path / "float", tmp_path / "direct", custom_mode="mxfp4"
    )
    same_files(expected, tmp_path / "direct")
    streamed = quantized(
        stream_model(tmp_path / "float", taken_memory() + (1 << 28)), experts_alone()
    )
    ModelExporter(tmp_path / "streamed").export_safetensors_model(streamed, custom_mode="mxfp4")
    same_files(expected, tmp_path / "streamed")
    convert(expected, tmp_path / "quark", "quark")
    convert(tmp_path / "quark", tmp_path / "again", "mxfp4")
    same_files(expected, tmp_path / "again")


def test_what_solvers_round_is_written(oss, export, logits):
    data = [torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(1))]
    model = quantized(oss(), experts_alone("mxfp4_weight_only", GPTQConfig()), data)
    loaded = ModelImporter(export(model, custom_mode="mxfp4")).import_model_info(oss())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("gpt_oss", experts_alone("mxfp4"), "its input is quantized"),
        ("gpt_oss", experts_alone("int4_wo_32"), "its weight is int4 per_group"),
        ("gpt_oss", Config(scheme("mxfp4_weight_only")), "it is no expert with a bias"),
        ("mixtral", experts_alone(), "it is no expert with a bias"),
        ("llama", Config(scheme("mxfp4_weight_only")), "it is no expert with a bias"),
    ],
)
def test_other_models_are_refused(build, oss, export, architecture, config, message):
    model = oss() if architecture == "gpt_oss" else build(architecture)
    with pytest.raises(ValueError, match=f"custom_mode='mxfp4' cannot hold .*{message}"):
        export(quantized(model, config), custom_mode="mxfp4")
