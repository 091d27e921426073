"""Checkpoints of auto-round: tensors of other formats under a section of its own."""

import json

import pytest
from transformers.quantizers import quantizer_auto_round

from quark.torch.export.recognition import (
    check_checkpoint,
    load_checkpoint,
    load_in_float,
    open_checkpoint,
)
from tests.configurations import config, groups, preset
from tests.unit.export.formats.gptq_files import set_section, write

SECTION = {
    **{"bits": 4, "group_size": 32, "sym": True, "data_type": "int", "iters": 200},
    **{"autoround_version": "0.16.1", "block_name_to_quantize": "model.layers"},
    "quant_method": "auto-round",
}
GPTQ, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
FLOATS = {"packing_format": "auto_round:llm_compressor"}
MX = {**SECTION, **FLOATS, "data_type": "mx_fp", "act_data_type": "mx_fp", "act_bits": 4}
NV = {
    **{**SECTION, **FLOATS, "data_type": "nv_fp", "group_size": 16, "act_bits": 4},
    "act_data_type": "nv_fp4_with_static_gs",
}
EXTRA = {
    ".*v_proj.*": {"bits": 8, "group_size": 64},
    "model.layers.0.self_attn.v_proj": {"bits": 2},
    "model.layers.1.mlp.down_proj": {"bits": 16},
}


def by_extra(name):
    """The scheme that ``EXTRA`` gives a layer: full names count first."""
    if name == "model.layers.0.self_attn.v_proj":
        return 2, 32, True
    if name.endswith("v_proj"):
        return 8, 64, True
    return None if name == "model.layers.1.mlp.down_proj" else (4, 32, True)


def check_values(path, values):
    state = load_in_float(path).state_dict()
    assert all(state[name].equal(value) for name, value in values.items())


class TestIntegers:
    @pytest.mark.parametrize(
        ("packing", "zero_offset"), [(GPTQ, 1), ("auto_round:gptqmodel", 0), ("auto_round", 0)]
    )
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_values(self, build, tmp_path, packing, zero_offset, symmetric, bits):
        section = {**SECTION, "bits": bits, "sym": symmetric, "packing_format": packing}
        form = (bits, 32, symmetric)
        check_values(
            tmp_path, write(build(), tmp_path, lambda name: form, section, zero_offset, False)
        )

    def test_options_of_layers(self, build, tmp_path):
        section = {**SECTION, "packing_format": GPTQ, "extra_config": EXTRA}
        check_values(tmp_path, write(build(), tmp_path, by_extra, section, 1, False))

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_awq(self, build, quantize, export, logits, symmetric):
        model = quantize(build(), config(groups("int4" if symmetric else "uint4", symmetric)))
        path = export(model, custom_mode="awq")
        set_section(path, {**SECTION, "sym": symmetric, "packing_format": AWQ})
        assert logits(load_checkpoint(path)).equal(logits(model))

    def test_awq_of_the_format_auto_awq(self, build, quantize, export, logits):
        """It stores zero points of 8 beside ``zero_point`` false."""
        model = quantize(build(), config(groups("int4")))
        path = export(model, custom_mode="awq")
        section = json.loads((path / "config.json").read_text())["quantization_config"]
        set_section(path, {**section, "zero_point": False})
        assert logits(load_checkpoint(path)).equal(logits(model))

    def test_awq_with_zero_points_that_should_not_be(self, build, quantize, export):
        path = export(quantize(build(), config(groups("uint4", False))), custom_mode="awq")
        set_section(path, {**SECTION, "packing_format": AWQ})
        with pytest.raises(ValueError, match="a zero point is not 8"):
            load_checkpoint(path)


class TestFloats:
    @pytest.mark.parametrize(("scheme", "section"), [("mxfp4", MX), ("nvfp4", NV)])
    def test_weights(self, build, quantize, export, scheme, section):
        path = export(quantize(build(), preset(scheme)), custom_mode="compressed-tensors")
        expected = load_in_float(path).state_dict()
        set_section(path, section)
        found = load_in_float(path).state_dict()
        assert all(found[name].equal(value) for name, value in expected.items())

    def test_inputs(self, build, quantize, export, logits):
        """auto-round rounds shared exponents of inputs down."""
        scheme = preset("mxfp4")
        weight = scheme.global_quant_config.weight
        inputs = scheme.global_quant_config.input_tensors.changed(scale_calculation_mode="floor")
        model = quantize(build(), config(weight, inputs))
        path = export(model, custom_mode="compressed-tensors")
        set_section(path, MX)
        assert logits(load_checkpoint(path)).equal(logits(model))

    def test_inputs_in_float(self, build, quantize, export):
        path = export(quantize(build(), preset("mxfp4")), custom_mode="compressed-tensors")
        set_section(path, {key: value for key, value in MX.items() if "act" not in key})
        layer = load_checkpoint(path).get_submodule("model.layers.0.mlp.up_proj")
        assert layer.quant_config.input_tensors is None


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"extra_config": {"v_proj": 3}}, "extra_config is not an object"),
            ({"extra_config": {"a.b": {"bits": "8"}}}, "is malformed"),
            ({"packing_format": [GPTQ]}, "is malformed"),
            ({**MX, "block_name_to_quantize": [["model.layers"]]}, "is malformed"),
            ({"extra_config": {"a.b": {"bits": 4, "data_type": "mx_fp"}}}, "data_type='mx_fp'"),
            ({"extra_config": {".*(v|k)_proj": {"bits": 8}}}, "list the layers"),
            ({"extra_config": {"a.b": {"bits": 8}}, "packing_format": AWQ}, "bits=8"),
            ({**MX, "group_size": 16}, "group_size=16"),
            ({**MX, "act_data_type": "mx_fp_rceil"}, "act_data_type='mx_fp_rceil'"),
            (
                {"packing_format": "auto_round:fake"},
                "packing_format='auto_round:fake'.*is not read",
            ),
            ({"packing_format": None}, "packing_format=None.*is not read.*Write the model with"),
            ({"packing_format": FLOATS["packing_format"], "data_type": "fp"}, "is not read"),
        ],
    )
    def test_sections(self, build, tmp_path, change, said, monkeypatch):
        monkeypatch.setattr(quantizer_auto_round, "is_auto_round_available", lambda: False)
        section = {**SECTION, "packing_format": GPTQ, **change}
        write(build(), tmp_path, lambda name: (4, 32, True), section, 1, False)
        for read in (open_checkpoint, load_in_float, load_checkpoint, check_checkpoint):
            with pytest.raises(ValueError, match=said):
                read(tmp_path)
