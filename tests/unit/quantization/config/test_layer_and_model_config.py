"""The configuration of a layer and of a model: what they take and what they refuse."""

from dataclasses import replace

import pytest
from torch import nn

import quark
from quark.torch.quantization.config.config import (
    AWQConfig,
    Config,
    FP8E4M3PerTensorSpec,
    GPTQConfig,
    Int8PerTensorSpec,
    ProgressiveSpec,
    QConfig,
    QLayerConfig,
    QuantizationConfig,
    QuantizationSpec,
    RotationConfig,
    ScaleQuantSpec,
    SmoothQuantConfig,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
from quark.torch.quantization.config.type import DeviceType, QuantFlow, QuantizationMode

INT8 = Int8PerTensorSpec().to_quantization_spec()
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
LAYER = QuantizationConfig(weight=INT8)
TENSORS = ["input_tensors", "output_tensors", "weight", "bias"]
AWQ, GPTQ, SMOOTH, ROTATION = AWQConfig(), GPTQConfig(), SmoothQuantConfig(), RotationConfig()


def test_both_spellings_are_one_class():
    assert QConfig is Config
    assert QLayerConfig is QuantizationConfig


def test_specs_of_a_layer_by_tensor():
    assert dict(QuantizationConfig(weight=INT8, input_tensors=FP8).specs()) == {
        "input_tensors": FP8,
        "weight": INT8,
    }
    assert QuantizationConfig().is_empty
    assert not QuantizationConfig(bias=INT8).is_empty


def test_tensors_by_position():
    layer = QuantizationConfig(INT8, FP8, None, None, "cpu")
    assert (layer.input_tensors, layer.output_tensors) == (INT8, FP8)
    assert layer.target_device is DeviceType.CPU


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_a_helper_without_conversion_is_refused(name, tensor):
    required = {"ch_axis": -1, "group_size": 32, "block_size": 16}
    fields = SPEC_CLASSES[name].__dataclass_fields__
    helper = SPEC_CLASSES[name](**{k: v for k, v in required.items() if k in fields})
    said = rf"{tensor}: .* got {name}.* Call \.to_quantization_spec\(\)"
    with pytest.raises(TypeError, match=said):
        QuantizationConfig(**{tensor: helper})


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize(
    "wrong",
    ["int8", 8, {"dtype": "int8"}, LAYER],
    ids=["name", "number", "dict", "layer"],
)
def test_what_is_no_specification_is_refused(wrong, tensor):
    said = rf"QuantizationConfig\.{tensor}: expected a QuantizationSpec or a list or None, got"
    with pytest.raises(TypeError, match=said):
        QuantizationConfig(**{tensor: wrong})


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_list_is_of_one_or_two_stages(tensor):
    assert getattr(QuantizationConfig(**{tensor: [INT8]}), tensor) == INT8
    scales = replace(FP8, is_scale_quant=True)
    dynamic = QuantizationSpec(
        "fp4", is_dynamic=True, qscheme="per_group", ch_axis=-1, group_size=16
    )
    both = getattr(QuantizationConfig(**{tensor: [dynamic, scales]}), tensor)
    assert both.stages == [dynamic, scales]
    for wrong in ([], [INT8, INT8, INT8]):
        with pytest.raises(ValueError, match=f"one or two stages, got {len(wrong)}"):
            QuantizationConfig(**{tensor: wrong})


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("helper", [ProgressiveSpec, ScaleQuantSpec])
def test_a_helper_of_two_stages_without_conversion_is_refused(helper, tensor):
    said = rf"{tensor}: .* got {helper.__name__}.*to_quantization_spec\(\)"
    with pytest.raises(TypeError, match=said):
        QuantizationConfig(**{tensor: helper(FP8, INT8)})


INT4 = replace(INT8, dtype="int4")
FLOAT16 = QuantizationSpec("float16")


SHIFTED = replace(INT8, dtype="uint8", symmetric=False)


@pytest.mark.parametrize("first", [SHIFTED, FLOAT16], ids=lambda spec: spec.dtype.name)
def test_codes_with_zero_points_are_not_quantized_again(first):
    said = rf"weight: QuantizationSpec\(dtype={first.dtype.name}\): second_stage=int4 cannot"
    for stages in ([first, INT4], ProgressiveSpec(first, INT4).to_quantization_spec()):
        with pytest.raises(ValueError, match=said):
            QuantizationConfig(weight=stages)
    with pytest.raises(ValueError, match=said):
        QuantizationConfig.from_dict({"weight": [first.to_dict(), INT4.to_dict()]})


@pytest.mark.parametrize("first", [INT8, INT4, FP8], ids=lambda spec: spec.dtype.name)
def test_codes_with_scales_are_quantized_again(first):
    layer = QuantizationConfig(weight=[first, INT4])
    assert [stage.dtype.name for stage in layer.weight.stages] == [first.dtype.name, "int4"]


@pytest.mark.parametrize("stages", [[INT8, "int4"], [None], [3, INT8]], ids=str)
def test_stages_are_specifications(stages):
    with pytest.raises(TypeError, match=r"weight\[\d\]: expected a QuantizationSpec, got"):
        QuantizationConfig(weight=stages)
    with pytest.raises(TypeError, match=r"stages\[\d\]: expected a QuantizationSpec, got"):
        QuantizationSpec.of_stages(stages)


@pytest.mark.parametrize("wrong", ["a", 3, LAYER, SPEC_CLASSES["FP8E4M3PerTensorSpec"]()])
def test_probabilities_take_a_specification(wrong):
    said = "Config.softmax_quant_spec: expected a QuantizationSpec or None, got"
    with pytest.raises(TypeError, match=said):
        Config(LAYER, softmax_quant_spec=wrong)


@pytest.mark.parametrize("tensor", ["input_tensors", "output_tensors"])
def test_activations_have_no_second_stage_over_codes(tensor):
    with pytest.raises(ValueError, match=f"{tensor}: .*second stage.* is for weights only"):
        QuantizationConfig(**{tensor: [FP8, INT8]})
    assert QuantizationConfig(weight=[FP8, INT8], bias=[FP8, INT8]).weight.stages == [FP8, INT8]


@pytest.mark.parametrize("tensor", ["input_tensors", "output_tensors"])
def test_activations_have_no_static_groups(tensor):
    static = Uint4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
    with pytest.raises(ValueError, match=f"{tensor}: .*no static scale per group.*is_dynamic=True"):
        QuantizationConfig(**{tensor: static})
    dynamic = replace(static, is_dynamic=True)
    assert getattr(QuantizationConfig(**{tensor: dynamic}), tensor) is dynamic
    assert QuantizationConfig(weight=static, bias=static).weight is static


def test_unknown_device_names_the_nearest():
    with pytest.raises(ValueError, match=r"target_device: 'cpx' is unknown\. Did you mean 'CPU'"):
        QuantizationConfig(target_device="cpx")


def test_defaults_of_a_model():
    config = Config(global_quant_config=LAYER)
    assert config.layer_quant_config == config.layer_type_quant_config == {}
    assert config.kv_cache_quant_config == {}
    assert config.exclude == config.kv_cache_group == config.shared_scale_groups == []
    assert config.algo_config is None and config.softmax_quant_spec is None
    assert config.quant_mode is QuantizationMode.eager_mode
    assert config.quant_flow is QuantFlow.standard
    assert config.version == quark.__version__
    assert config.log_severity_level == 1
    assert config.min_kv_scale == 0.0


def test_documented_positions():
    layer_type, layer, cache = {nn.Linear: LAYER}, {"*q_proj": LAYER}, {"*k_proj": LAYER}
    config = Config(
        LAYER,
        layer_type,
        layer,
        cache,
        INT8,
        ["lm_head"],
        AWQ,
        [SMOOTH],
        QuantizationMode.fx_graph_mode,
        2,
        "0.9",
    )
    assert config.global_quant_config is LAYER
    assert config.layer_type_quant_config == layer_type
    assert config.layer_quant_config == layer
    assert config.kv_cache_quant_config == cache
    assert config.softmax_quant_spec is INT8
    assert config.exclude == ["lm_head"]
    assert config.algo_config == [SMOOTH, AWQ]
    assert config.quant_mode is QuantizationMode.fx_graph_mode
    assert (config.log_severity_level, config.version) == (2, "0.9")


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        (None, None, None),
        (None, [], None),
        (None, AWQ, [AWQ]),
        (None, [AWQ], [AWQ]),
        (None, [GPTQ, AWQ], [GPTQ, AWQ]),
        (None, (GPTQ, AWQ), [GPTQ, AWQ]),
        (SMOOTH, None, [SMOOTH]),
        ([SMOOTH], AWQ, [SMOOTH, AWQ]),
        ([ROTATION, SMOOTH], [AWQ], [ROTATION, SMOOTH, AWQ]),
    ],
    ids=[
        "none",
        "empty",
        "single",
        "list",
        "ordered",
        "tuple",
        "before alone",
        "before single",
        "before list",
    ],
)
def test_algorithms_are_one_list_with_transformations_first(before, given, expected):
    config = Config(LAYER, algo_config=given, pre_quant_opt_config=before)
    assert config.algo_config == expected
    assert config.pre_quant_opt_config == []
    assert replace(config, exclude=["lm_head"]).algo_config == expected


@pytest.mark.parametrize("field", ["algo_config", "pre_quant_opt_config"])
@pytest.mark.parametrize(
    "wrong", ["awq", AWQConfig, {"name": "awq"}], ids=["name", "class", "dict"]
)
def test_what_is_no_algorithm_is_refused(field, wrong):
    with pytest.raises(TypeError, match=rf"Config\.{field}\[0\]: expected an AlgoConfig, got"):
        Config(LAYER, **{field: [wrong]})


@pytest.mark.parametrize("field", ["exclude", "kv_cache_group"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, []), ("lm_head", ["lm_head"]), (("a", "b"), ["a", "b"]), (["a"], ["a"])],
    ids=repr,
)
def test_patterns_become_a_list(field, given, expected):
    assert getattr(Config(LAYER, **{field: given}), field) == expected


@pytest.mark.parametrize(
    "field", ["layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"]
)
def test_mappings_may_be_none_and_are_copied(field):
    assert getattr(Config(LAYER, **{field: None}), field) == {}
    given = {nn.Linear if "type" in field else "*q_proj": LAYER}
    config = Config(LAYER, **{field: given})
    given.clear()
    assert list(getattr(config, field).values()) == [LAYER]


@pytest.mark.parametrize("wrong", [None, INT8, "int8", {}], ids=["None", "spec", "name", "dict"])
def test_global_configuration_is_of_a_layer(wrong):
    with pytest.raises(TypeError, match="global_quant_config: expected a QuantizationConfig, got"):
        Config(wrong)


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("layer_quant_config", "*q_proj"),
        ("layer_type_quant_config", nn.Linear),
        ("kv_cache_quant_config", "*k_proj"),
    ],
)
def test_layer_configurations_are_of_layers(field, key):
    with pytest.raises(TypeError, match=rf"{field}.*: expected a QuantizationConfig, got"):
        Config(LAYER, **{field: {key: INT8}})


@pytest.mark.parametrize("key", ["Linear", int, nn.Linear(1, 1)], ids=["name", "int", "module"])
def test_layer_types_are_module_classes(key):
    with pytest.raises(TypeError, match="layer_type_quant_config: expected module classes"):
        Config(LAYER, layer_type_quant_config={key: LAYER})


def test_cache_patterns_are_those_of_the_group_or_of_the_configuration():
    cache = {"*k_proj": LAYER, "*v_proj": LAYER}
    assert Config(LAYER).kv_cache_patterns == []
    assert Config(LAYER, kv_cache_quant_config=cache).kv_cache_patterns == ["*k_proj", "*v_proj"]
    both = Config(LAYER, kv_cache_quant_config=cache, kv_cache_group=["*k", "*v"])
    assert both.kv_cache_patterns == ["*k", "*v"]


def test_enumerations_of_a_model_by_name():
    config = Config(LAYER, quant_mode="fx_graph_mode", quant_flow="per_block")
    assert config.quant_mode is QuantizationMode.fx_graph_mode
    assert config.quant_flow is QuantFlow.per_block
    with pytest.raises(ValueError, match=r"quant_flow: 'perblock' is unknown.*'per_block'"):
        Config(LAYER, quant_flow="perblock")


@pytest.mark.parametrize("tensor", ["input_tensors", "output_tensors"])
@pytest.mark.parametrize("is_dynamic", [True, False, None])
def test_activations_of_mx_are_dynamic(tensor, is_dynamic):
    """The format has no other scales; AMD Quark writes false."""
    fields = {"mx_element_dtype": "fp4", "ch_axis": -1, "group_size": 32, "is_dynamic": is_dynamic}
    made = QuantizationConfig(**{tensor: QuantizationSpec("mx", **fields)})
    assert getattr(made, tensor).is_dynamic is True
    assert not getattr(made, tensor).needs_data


def test_the_rotation_of_a_model():
    assert Config(algo_config=[AWQ, ROTATION, GPTQ]).get_rotation_config() is ROTATION
    assert Config(algo_config=[AWQ]).get_rotation_config() is None
    assert Config().get_rotation_config() is None
