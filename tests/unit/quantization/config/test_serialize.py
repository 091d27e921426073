"""Configurations to JSON and back, here and as earlier versions wrote them."""

import copy
import json
from pathlib import Path

import pytest
from torch import nn

import quark
from quark.torch.quantization.config.algo import (
    ALGO_CONFIGS,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTQConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES, scheme, scheme_names
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
from quark.torch.quantization.config.template import LLMTemplate
from quark.torch.quantization.config.type import DeviceType, QuantFlow

VERSIONS = Path(__file__).parents[2] / "data" / "config"

# The keys of a checkpoint's config.json, as current readers expect them.
SPEC_KEYS = [
    "block_size",
    "ch_axis",
    "dtype",
    "enable_buffer_reuse",
    "group_size",
    "is_dynamic",
    "is_scale_quant",
    "max_input_numel",
    "mx_element_dtype",
    "observer_cls",
    "qscheme",
    "round_method",
    "scale_calculation_mode",
    "scale_format",
    "scale_type",
    "symmetric",
    "zero_point_type",
]
LAYER_KEYS = ["bias", "input_tensors", "output_tensors", "target_device", "weight"]
CONFIG_KEYS = [
    "algo_config",
    "exclude",
    "global_quant_config",
    "kv_cache_post_rope",
    "kv_cache_quant_config",
    "layer_quant_config",
    "layer_type_quant_config",
    "quant_mode",
    "softmax_quant_spec",
    "version",
]


def through_json(data):
    return json.loads(json.dumps(data, sort_keys=True))


def int8(**given):
    return QuantizationSpec(**{"dtype": "int8", "qscheme": "per_tensor", **given})


@pytest.mark.parametrize("kv_cache_scheme", [None, *KV_CACHE_SCHEMES])
@pytest.mark.parametrize("name", scheme_names())
def test_preset_round_trip(name, kv_cache_scheme):
    config = LLMTemplate.get("llama").get_config(
        name, kv_cache_scheme=kv_cache_scheme, min_kv_scale=0.25
    )
    assert Config.from_dict(through_json(config.to_dict(everything=True))) == config
    layout = config.to_dict()
    assert list(layout) == CONFIG_KEYS
    read = Config.from_dict(through_json(layout))
    assert read.to_dict() == layout
    assert read.global_quant_config == config.global_quant_config
    assert read.layer_quant_config == config.layer_quant_config
    assert read.kv_cache_quant_config == config.kv_cache_quant_config


def full_config():
    """Every field other than its default."""
    layer = scheme("fp8")
    return Config(
        global_quant_config=scheme("uint4_wo_32"),
        layer_type_quant_config={nn.Linear: scheme("int8"), nn.Conv2d: QuantizationConfig()},
        layer_quant_config={"*b": layer, "*a": scheme("int8_wo")},
        kv_cache_quant_config={"*k_proj": layer},
        softmax_quant_spec=int8(),
        exclude=["lm_head"],
        algo_config=[cls() for cls in ALGO_CONFIGS.values()],
        quant_mode="fx_graph_mode",
        log_severity_level=3,
        version="0.13",
        kv_cache_group=["*k_proj"],
        min_kv_scale=0.5,
        kv_cache_post_rope=True,
        shared_scale_groups=[["q_proj", "k_proj"]],
        quant_flow=QuantFlow.per_block,
        gpu_resident_blocks=2,
        sync_moe_expert_input_amax=True,
        keep_prequantized_layers=False,
        export=JsonExporterConfig([["*q_proj"]], ["*k_proj"], 0.5, "fake_quantized", "order"),
    )


def test_every_field_survives():
    config = full_config()
    plain = Config()
    fields = set(Config.__dataclass_fields__) - {"pre_quant_opt_config"}
    same = {f for f in fields if getattr(config, f) == getattr(plain, f)}
    assert not same, "give these a value other than the default"
    assert Config.from_dict(through_json(config.to_dict(everything=True))) == config


BLOCK = {"group_size": 16, "block_size": 16}


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_specification_round_trip(name):
    fields = SPEC_CLASSES[name].__dataclass_fields__
    required = {k: v for k, v in {"ch_axis": 0, **BLOCK}.items() if k in fields}
    spec = SPEC_CLASSES[name](**required).to_quantization_spec()
    data = spec.to_dict()
    assert list(data) == SPEC_KEYS
    assert data["dtype"] == spec.dtype.name
    assert data["observer_cls"] == (None if spec.fixes_blocks else spec.observer_cls.__name__)
    assert QuantizationSpec.from_dict(through_json(data)) == spec


def test_an_observer_of_ones_choice_is_written():
    spec = QuantizationSpec("mx9", "PerTensorMSEObserver", ch_axis=-1, group_size=16)
    assert spec.to_dict()["observer_cls"] == "PerTensorMSEObserver"
    assert QuantizationSpec.from_dict(spec.to_dict()) == spec


def test_key_sets_of_the_checkpoint_layout():
    data = full_config().to_dict()
    assert list(data) == sorted([*CONFIG_KEYS, "export"])
    assert list(data["global_quant_config"]) == LAYER_KEYS
    assert list(data["global_quant_config"]["weight"]) == SPEC_KEYS
    assert list(data["softmax_quant_spec"]) == SPEC_KEYS
    assert list(data["layer_type_quant_config"]) == ["Linear", "Conv2d"]
    assert sorted(data["export"]) == [
        "kv_cache_group",
        "min_kv_scale",
        "pack_method",
        "weight_format",
        "weight_merge_groups",
    ]


def test_values_of_the_checkpoint_layout():
    """To the letter what a checkpoint of a 4-bit model says."""
    config = Config(QuantizationConfig(weight=scheme("uint4_wo_32").weight), exclude=["lm_head"])
    assert json.loads(json.dumps(config.to_dict())) == {
        "algo_config": None,
        "exclude": ["lm_head"],
        "global_quant_config": {
            "bias": None,
            "input_tensors": None,
            "output_tensors": None,
            "target_device": None,
            "weight": {
                "block_size": None,
                "ch_axis": -1,
                "dtype": "uint4",
                "enable_buffer_reuse": False,
                "group_size": 32,
                "is_dynamic": False,
                "is_scale_quant": False,
                "max_input_numel": 4194304,
                "mx_element_dtype": None,
                "observer_cls": "PerGroupMinMaxObserver",
                "qscheme": "per_group",
                "round_method": "half_even",
                "scale_calculation_mode": None,
                "scale_format": None,
                "scale_type": "float",
                "symmetric": False,
                "zero_point_type": "int32",
            },
        },
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": quark.__version__,
    }


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
    assert Config.from_dict(through_json(config.to_dict())) == config


@pytest.mark.parametrize("missing", [*CONFIG_KEYS, "export", "quant_method"])
def test_each_key_may_be_missing_or_null(missing):
    given = version("0.13")
    del given[missing]
    assert isinstance(Config.from_dict(given), Config)
    assert isinstance(Config.from_dict({**given, missing: None}), Config)


def test_transformations_of_earlier_versions_precede():
    given = {"algo_config": {"name": "awq"}, "pre_quant_opt_config": [{"name": "rotation"}]}
    assert Config.from_dict(given).algo_config == [RotationConfig(), AWQConfig()]


def test_a_missing_layer_quantizes_nothing():
    read = Config.from_dict({"layer_quant_config": {"*up_proj": None}})
    assert read.layer_quant_config["*up_proj"].is_empty
    assert read.global_quant_config.is_empty


@pytest.mark.parametrize("is_scale_quant", [True, False], ids=["of scales", "of codes"])
def test_two_stages_are_a_list(is_scale_quant):
    stages = [
        QuantizationSpec("fp4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=False),
        int8(is_scale_quant=is_scale_quant),
    ]
    layer = QuantizationConfig(weight=stages)
    data = through_json(layer.to_dict())["weight"]
    assert data == [stage.to_dict() for stage in stages]
    assert [list(stage) for stage in data] == [SPEC_KEYS, SPEC_KEYS]
    read = Config.from_dict({"global_quant_config": {"weight": data}}).global_quant_config
    assert read == layer
    assert read.weight.stages == stages
    assert read.weight.stages[1].is_scale_quant is is_scale_quant


def test_a_single_stage_in_a_list_is_that_stage():
    weight = [int8().to_dict()]
    assert Config.from_dict({"global_quant_config": {"weight": weight}}).global_quant_config == (
        QuantizationConfig(weight=int8())
    )


SPEC = int8().to_dict()
REFUSED = {
    "key of the configuration": (
        {"layer_quant_configs": {}},
        "key of quantization_config: 'layer_quant_configs'.*Did you mean 'layer_quant_config'",
    ),
    "key of a layer": (
        {"global_quant_config": {"weights": SPEC}},
        "key of layer configuration: 'weights'.*Did you mean 'weight'",
    ),
    "key of a layer by name": (
        {"layer_quant_config": {"*q_proj": {"input_tensor": SPEC}}},
        "key of layer configuration: 'input_tensor'.*Did you mean 'input_tensors'",
    ),
    "key of a specification": (
        {"global_quant_config": {"weight": {**SPEC, "groupsize": 32}}},
        "key of tensor specification: 'groupsize'.*Did you mean 'group_size'",
    ),
    "key of the export": (
        {"export": {"pack_methods": "order"}},
        "key of quantization_config.export: 'pack_methods'.*Did you mean 'pack_method'",
    ),
    "key of an algorithm": (
        {"algo_config": [{"name": "gptq", "damp_percents": 0.1}]},
        "option of algorithm 'gptq': 'damp_percents'.*Did you mean 'damp_percent'",
    ),
    "name of an algorithm": (
        {"algo_config": {"name": "smoth"}},
        "algorithm: 'smoth' is unknown. Did you mean 'smooth'",
    ),
    "name of a format": (
        {"global_quant_config": {"weight": {**SPEC, "dtype": "unit4"}}},
        "dtype: 'unit4' is unknown. Did you mean 'uint4'",
    ),
    "name of an observer": (
        {"global_quant_config": {"weight": {**SPEC, "observer_cls": "PerTensorMinMaxObserve"}}},
        "observer_cls: .*Did you mean 'PerTensorMinMaxObserver'",
    ),
    "module type": (
        {"layer_type_quant_config": {"Linaer": {}}},
        "layer_type_quant_config: 'Linaer' is unknown. Did you mean 'Linear'",
    ),
    "quant_mode": ({"quant_mode": "eager"}, "quant_mode: 'eager'.*Did you mean 'eager_mode'"),
    "quant_flow": ({"quant_flow": "standart"}, "quant_flow: .*Did you mean 'standard'"),
    "pack_method": ({"export": {"pack_method": "oder"}}, "pack_method: .*Did you mean 'order'"),
    "three stages": (
        {"global_quant_config": {"weight": [SPEC, SPEC, SPEC]}},
        "A tensor is quantized in one or two stages, got 3",
    ),
    "no stage": ({"global_quant_config": {"weight": []}}, "one or two stages, got 0"),
    "key of the second stage": (
        {"global_quant_config": {"weight": [SPEC, {**SPEC, "groupsize": 32}]}},
        "key of tensor specification: 'groupsize'.*Did you mean 'group_size'",
    ),
    "format of scales": (
        {"global_quant_config": {"weight": {**SPEC, "scale_format": "e8m1"}}},
        "scale_format: 'e8m1' is unknown. Did you mean 'e8m0'",
    ),
    "no format": ({"global_quant_config": {"weight": {}}}, "dtype is required"),
    "specification by name": (
        {"global_quant_config": {"weight": "int8"}},
        "tensor specification: expected an object, got 'int8'",
    ),
    "layers in a list": (
        {"layer_quant_config": [SPEC]},
        r"layer_quant_config: expected an object of layer configurations, got \[",
    ),
    "layer by name": (
        {"global_quant_config": "int8"},
        "layer configuration: expected an object, got 'int8'",
    ),
    "export by name": (
        {"export": "order"},
        "quantization_config.export: expected an object, got 'order'",
    ),
    "broken rule": (
        {"global_quant_config": {"weight": {**SPEC, "qscheme": "per_group"}}},
        "per_group needs an integer ch_axis",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    given, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        Config.from_dict(given)


@pytest.mark.parametrize("data", [[1], "quark", None], ids=["list", "string", "null"])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(ValueError, match="quantization_config: expected an object"):
        Config.from_dict(data)
