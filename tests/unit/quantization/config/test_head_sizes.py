"""Channels of a head, for outputs that have a scale per head."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.head_sizes import with_head_sizes
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.presets import scheme

HEAD = QuantizationSpec("int8", qscheme="per_head", is_dynamic=False)


class Attention(nn.Module):
    """Keys of two heads, whose channels the module may name."""

    def __init__(self, size=None):
        super().__init__()
        self.k_proj = nn.Linear(8, 16)
        if size is not None:
            self.head_dim = size

    def forward(self, x):
        return self.k_proj(x)


def cached(spec=HEAD, patterns=("*k_proj",)):
    layer = QuantizationConfig(output_tensors=spec)
    return Config(QuantizationConfig(), kv_cache_quant_config=dict.fromkeys(patterns, layer))


def sizes(config, model):
    entries = with_head_sizes(config, model).kv_cache_quant_config.values()
    return [layer.output_tensors.group_size for layer in entries]


def test_the_module_around_a_layer_knows_its_heads():
    model = nn.Sequential(Attention(8), Attention(8))
    assert sizes(cached(), model) == [8]
    assert sizes(cached(replace(HEAD, group_size=4)), model) == [4]


def test_schemes_of_the_cache(build):
    config = with_kv_cache(Config(scheme("int8_wo")), ["*k_proj"], "int8_per_token_head")
    model = ModelQuantizer(replace(config, exclude=["lm_head"])).quantize_model(build())
    used = model.quant_config
    for entries in (used.layer_quant_config, used.kv_cache_quant_config):
        assert entries["*k_proj"].output_tensors.group_size == 16
    x = torch.randn(2, 3, 32)
    heads = x.view(2, 3, 2, 16)
    step = heads.abs().amax(-1, keepdim=True) / 127.5
    quantizer = model.model.layers[0].self_attn.k_proj.output_quantizer
    expected = ((heads * step.reciprocal()).round().clamp(-128, 127) * step).view(x.shape)
    assert torch.equal(quantizer(x), expected)


def test_heads_of_several_sizes():
    model = nn.Sequential(Attention(8), Attention(4))
    with pytest.raises(ValueError, match=r"heads of 0\.k_proj have 8 channels, those of 1\.k_proj"):
        sizes(cached(), model)
    both = cached(patterns=("0.k_proj", "1.k_proj"))
    layers = dict(both.kv_cache_quant_config)
    layers["1.k_proj"] = QuantizationConfig(output_tensors=replace(HEAD, group_size=4))
    assert sizes(replace(both, kv_cache_quant_config=layers), model) == [8, 4]


@pytest.mark.parametrize(
    ("model", "spec", "problem"),
    [
        (Attention(), HEAD, "the Attention around k_proj has no head_dim. Give the channels"),
        (Attention(5), HEAD, "k_proj.output_tensors: heads of 5 channels do not divide its 16"),
        (
            nn.Sequential(nn.Conv2d(2, 4, 1)),
            replace(HEAD, group_size=2),
            "the outputs of a Conv2d have no heads",
        ),
    ],
)
def test_models_that_do_not_fit(model, spec, problem):
    patterns = ("k_proj", "0")
    with pytest.raises(ValueError, match=problem):
        ModelQuantizer(cached(spec, patterns)).quantize_model(model, [torch.zeros(1, 8)])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"group_size": 0}, "group_size=0: give the channels of a head"),
        ({"ch_axis": 0}, "heads divide the last axis: leave out ch_axis=0"),
        ({"dtype": "bfloat16"}, "per_head is for formats with one scale for each block"),
        ({"observer_cls": "LSQObserver"}, "scales per head do not train"),
    ],
)
def test_specifications_that_contradict_themselves(changes, problem):
    with pytest.raises(ValueError, match=problem):
        replace(HEAD, **{"observer_cls": None, **changes})


@pytest.mark.parametrize("tensor", ["weight", "bias", "input_tensors"])
def test_outputs_alone_have_heads(tensor):
    with pytest.raises(ValueError, match=f"{tensor}: scales per head are for output_tensors"):
        QuantizationConfig(**{tensor: HEAD})


def test_statistics_have_the_ranges_of_heads(build, batches):
    config = Config(scheme("int8_wo"), exclude=["lm_head"])
    config = with_kv_cache(config, ["*v_proj"], "fp8_per_head")
    by_data = ModelQuantizer(config).quantize_model(build(), batches)
    statistics = collect_statistics(build(), batches)
    by_statistics = ModelQuantizer(config).quantize_model(build(), statistics=statistics)
    for first, second in zip(by_data.model.layers, by_statistics.model.layers, strict=True):
        scales = [m.self_attn.v_proj.output_quantizer.scale for m in (first, second)]
        assert torch.equal(*scales) and scales[0].shape == (2,)
