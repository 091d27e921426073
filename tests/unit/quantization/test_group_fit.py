"""Groups and super-blocks that divide the weights of a model."""

import pytest

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.algo import RotationConfig
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.resolution import resolve_names
from quark.torch.quantization.group_fit import (
    common_group_size,
    fit_group_sizes,
    fit_rotation_size,
    fit_super_blocks,
)
from quark.torch.quantization.nn.operators import is_operator

SIZES = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}


def group_sizes(model, config):
    """Layer -> group size, of the layers that a configuration quantizes."""
    operators = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    chosen = assign(operators, resolve_names(config, model))
    return {name: layer.weight.group_size for name, layer in chosen.items()}


def test_a_usual_size_that_divides_takes_the_place(build, config_of):
    model = build("llama", **SIZES, intermediate_size=128)
    config = config_of("int4_wo_128")
    fitted, changed = fit_group_sizes(model, config)
    assert set(changed.values()) == {32}
    assert "model.layers.*.mlp.gate_proj" in changed
    assert "model.layers.*.mlp.down_proj" not in changed  # it has 128 inputs
    for name, size in group_sizes(model, fitted).items():
        assert size == (128 if name.endswith("down_proj") else 32), name
    with pytest.raises(ValueError, match="does not divide its 96"):
        ModelQuantizer(config).quantize_model(model)
    ModelQuantizer.freeze(ModelQuantizer(fitted).quantize_model(model))


def test_inputs_in_the_same_groups_follow(build, config_of):
    model = build("llama", **SIZES)
    fitted, changed = fit_group_sizes(model, config_of("int4_wa_128"))
    layer = fitted.layer_quant_config["model.layers.*.self_attn.q_proj"]
    assert layer.weight.group_size == layer.input_tensors.group_size == 32
    assert changed


def test_what_fits_stays(build, config_of):
    model = build("llama")
    for name in ("int4_wo_32", "fp8", "mxfp4", "nvfp4"):
        config = config_of(name)
        assert fit_group_sizes(model, config) == (config, {})


def test_layers_that_were_chosen_by_name_keep_their_configuration(build, config_of):
    model = build("llama", **SIZES, num_hidden_layers=2)
    config = config_of("int4_wo_128", layer_quant_config={"model.layers.1.*": scheme("int8_wo")})
    fitted, _ = fit_group_sizes(model, config)
    sizes = group_sizes(model, fitted)
    assert sizes["model.layers.0.self_attn.q_proj"] == 32
    assert sizes["model.layers.1.self_attn.q_proj"] is None


def test_experts_are_fitted_too(build, config_of):
    model = build("mixtral", **SIZES, intermediate_size=48, num_local_experts=2)
    fitted, changed = fit_group_sizes(model, config_of("int4_wo_64"))
    assert changed["model.layers.*.mlp.experts.*.w2"] == 48
    assert changed["model.layers.*.mlp.experts.*.w1"] == 32
    ModelQuantizer.freeze(ModelQuantizer(fitted).quantize_model(model))


@pytest.mark.parametrize(
    ("given", "inputs", "fitting"),
    [
        *((128, 100, 100), (128, 72, 72), (128, 36, 36), (128, 96, 32), (128, 160, 32)),
        *((128, 200, 100), (128, 254, 127), (128, 262, 131), (128, 131, 131), (128, 12, 12)),
        *((32, 48, 24), (24, 64, 16), (32, 7, 7), (32, 74, 37), (128, 384, None)),
    ],
)
def test_every_width_has_groups(build, config_of, given, inputs, fitting):
    model = build("llama", intermediate_size=inputs)
    config = config_of(f"int4_wo_{given}", exclude=["lm_head", "*self_attn*", "*gate*", "*up*"])
    fitted, changed = fit_group_sizes(model, config)
    expected = {} if fitting is None else {"model.layers.*.mlp.down_proj": fitting}
    assert changed == expected
    ModelQuantizer.freeze(ModelQuantizer(fitted).quantize_model(model))


@pytest.mark.parametrize(
    ("given", "inputs", "common"),
    [(128, 96, 32), (128, 72, 8), (128, 100, None), (24, 96, 16), (32, 128, 16), (16, 48, 8)],
)
def test_a_size_for_all_layers(build, config_of, given, inputs, common):
    model = build("llama", intermediate_size=inputs)
    assert common_group_size(model, config_of(f"int4_wo_{given}")) == common


@pytest.mark.parametrize(
    ("name", "other"),
    [("q2_k", "iq4_nl"), ("q3_k", "iq4_nl"), ("q4_k", "q5_0"), ("q5_k", "q5_1"), ("q6_k", "q8_0")],
)
def test_layers_that_super_blocks_do_not_divide_take_another_scheme(build, config_of, name, other):
    model = build("llama", **SIZES, intermediate_size=256)
    config = config_of(name)
    fitted, changed = fit_super_blocks(model, config)
    assert set(changed.values()) == {other}
    operators = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    chosen = assign(operators, resolve_names(fitted, model))
    for layer, own in chosen.items():
        expected = name if layer.endswith("down_proj") else other  # it has 256 inputs
        assert own.weight == scheme(expected).weight, layer
    wide = build("llama", hidden_size=256, intermediate_size=512)
    assert fit_super_blocks(wide, config) == (config, {})
    assert fit_super_blocks(model, config_of("int4_wo_32")) == (config_of("int4_wo_32"), {})


@pytest.mark.parametrize(
    ("hidden", "intermediate", "given", "expected"),
    [
        (96, 160, 32, None),
        (48, 96, 32, 16),
        (48, 96, None, None),
        (40, 96, 64, 8),
        (48, 45, 32, None),
    ],
)
def test_rotations_divide_all_inputs(build, config_of, hidden, intermediate, given, expected):
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 16}
    model = build("llama", **sizes)
    rotation = RotationConfig(r1=False, rotation_size=given)
    config = config_of("int4_wo_32", algo_config=[rotation])
    fitted, size = fit_rotation_size(model, config)
    assert size == expected
    assert fitted.algo_config[0].rotation_size == (given if expected is None else expected)
    assert config.algo_config == [rotation] and rotation.rotation_size == given  # unchanged
    assert fit_rotation_size(model, config_of("int4_wo_32"))[1] is None
