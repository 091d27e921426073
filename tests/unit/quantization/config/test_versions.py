"""Configurations that earlier versions wrote."""

import copy
import json
from pathlib import Path

import pytest
from torch import nn

from quark.torch.quantization.config.algo import (
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTQConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.type import DeviceType

VERSIONS = Path(__file__).parents[3] / "data" / "config"


def version(name):
    return json.loads((VERSIONS / f"v{name}.json").read_text())


def test_version_0_8():
    config = Config.from_dict(version("0.8"))
    weight = QuantizationSpec(
        "uint4",
        qscheme="per_group",
        ch_axis=1,
        group_size=32,
        symmetric=False,
        is_dynamic=False,
        round_method="half_even",
        scale_type="float",
    )
    assert config.global_quant_config == QuantizationConfig(weight=weight)
    assert config.exclude == []
    assert config.layer_quant_config == config.layer_type_quant_config == {}
    assert config.kv_cache_quant_config == {}
    assert config.export is None
    (algorithm,) = config.algo_config
    assert type(algorithm) is AWQConfig
    assert algorithm.model_decoder_layers == "model.decoder.layers"
    assert algorithm.scaling_layers[0]["layers"] == ["self_attn.q_proj"]


def test_version_0_9():
    config = Config.from_dict(version("0.9"))
    fp8 = QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=False)
    assert config.global_quant_config == QuantizationConfig(weight=fp8, input_tensors=fp8)
    cached = QuantizationConfig(weight=fp8, input_tensors=fp8, output_tensors=fp8)
    assert config.layer_quant_config == {"*k_proj": cached, "*v_proj": cached}
    assert config.algo_config == [
        AutoSmoothQuantConfig(model_decoder_layers="model.layers", compute_scale_loss="MAE")
    ]
    assert config.export == JsonExporterConfig(
        kv_cache_group=["*k_proj", "*v_proj"], min_kv_scale=0.01
    )
    assert config.version == "0.9"


def test_version_0_10():
    config = Config.from_dict(version("0.10"))
    channel = QuantizationSpec(
        "int8",
        qscheme="per_channel",
        ch_axis=0,
        symmetric=True,
        is_dynamic=False,
        round_method="half_even",
        scale_type="float",
    )
    assert config.layer_type_quant_config == {
        nn.Linear: QuantizationConfig(weight=channel, target_device=DeviceType.CPU),
        nn.Conv2d: QuantizationConfig(weight=channel),
    }
    assert config.algo_config == [
        SmoothQuantConfig(alpha=0.5, model_decoder_layers="model.layers"),
        GPTQConfig(
            desc_act=False,
            inside_layer_modules=["self_attn.q_proj"],
            model_decoder_layers="model.layers",
        ),
    ]
    assert config.export.weight_format == "fake_quantized"
    assert config.export.pack_method == "order"
    assert config.export.weight_merge_groups == [["*up_proj", "*gate_proj"]]
    assert config.quant_mode.name == "eager_mode"
    assert config.version == "0.10"


def test_version_0_13():
    config = Config.from_dict(version("0.13"))
    fp8 = QuantizationSpec(
        "fp8_e4m3",
        qscheme="per_tensor",
        symmetric=True,
        is_dynamic=False,
        round_method="half_even",
    )
    weight = config.global_quant_config.weight
    assert weight.dtype.name == "uint4" and weight.group_size == 32
    assert config.kv_cache_quant_config == {
        "*k_proj": QuantizationConfig(weight=weight, output_tensors=fp8),
        "*v_proj": QuantizationConfig(output_tensors=fp8),
    }
    assert config.exclude == ["lm_head", "*v_proj"]
    assert config.to_dict() == {k: v for k, v in version("0.13").items() if k != "quant_method"}


@pytest.mark.parametrize("name", ["0.8", "0.9", "0.10", "0.13"])
def test_reading_a_version_again_changes_nothing(name):
    given = version(name)
    before = copy.deepcopy(given)
    config = Config.from_dict(given)
    assert given == before
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("missing", version("0.13"))
def test_each_key_may_be_missing_or_null(missing):
    given = version("0.13")
    del given[missing]
    assert isinstance(Config.from_dict(given), Config)
    assert isinstance(Config.from_dict({**given, missing: None}), Config)


def test_transformations_of_earlier_versions_precede():
    given = {"algo_config": {"name": "awq"}, "pre_quant_opt_config": [{"name": "rotation"}]}
    assert Config.from_dict(given).algo_config == [RotationConfig(), AWQConfig()]
