"""Configurations to JSON and back, here and as earlier versions wrote them."""

import json
from pathlib import Path

import pytest
from torch import nn

import quark
from quark.torch.quantization.config.algo import (
    ALGO_CONFIGS,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.graph import PassOptions, ShiftLimits
from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES, scheme, scheme_names
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
from quark.torch.quantization.config.template import LLMTemplate
from quark.torch.quantization.config.type import QuantFlow

VERSIONS = Path(__file__).parents[3] / "data" / "config"

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


@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.sampled(9)
def test_preset_round_trip(name):
    for kv_cache in (None, *KV_CACHE_SCHEMES):
        config = LLMTemplate.get("llama").get_config(
            name, kv_cache_scheme=kv_cache, min_kv_scale=0.25
        )
        assert Config.from_dict(through_json(config.to_dict(everything=True))) == config, kv_cache
        layout = config.to_dict()
        assert list(layout) == CONFIG_KEYS, kv_cache
        read = Config.from_dict(through_json(layout))
        assert read.to_dict() == layout, kv_cache
        for layers in ("global_quant_config", "layer_quant_config", "kv_cache_quant_config"):
            assert getattr(read, layers) == getattr(config, layers), (kv_cache, layers)


def full_config():
    """Every field other than its default."""
    layer = scheme("fp8")
    return Config(
        global_quant_config=scheme("uint4_wo_32"),
        layer_type_quant_config={nn.Linear: scheme("int8"), nn.Conv2d: QuantizationConfig()},
        layer_quant_config={"*b": layer, "*a": scheme("int8_wo")},
        kv_cache_quant_config={"*k_proj": layer},
        query_quant_config={"*q_proj": layer},
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
        moe_calibrate_all_experts=True,
        keep_prequantized_layers=False,
        export=JsonExporterConfig([["*q_proj"]], ["*k_proj"], 0.5, "fake_quantized", "order"),
        float_parts=["tower"],
        pass_options=PassOptions(channel_caps=True),
        shift_limits=ShiftLimits(write=(-3, 3)),
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
    added = ["export", "pass_options", "query_quant_config", "shift_limits"]
    assert list(data) == sorted([*CONFIG_KEYS, *added])
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


def test_a_missing_layer_quantizes_nothing():
    read = Config.from_dict({"layer_quant_config": {"*up_proj": None}})
    assert read.layer_quant_config["*up_proj"].is_empty
    assert read.global_quant_config.is_empty


@pytest.mark.parametrize("is_scale_quant", [True, False], ids=["of scales", "of codes"])
def test_two_stages_are_a_list(is_scale_quant):
    stages = [
        QuantizationSpec("fp4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=False),
        QuantizationSpec(
            "fp8_e4m3", qscheme="per_tensor", is_dynamic=False, is_scale_quant=is_scale_quant
        ),
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
