"""A configuration that an export is given must say how the model is quantized."""

import json
from dataclasses import replace

import pytest
import torch

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer
from quark.torch.quantization.config.algo import AWQConfig, RotationConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.group_fit import fit_group_sizes
from tests.configurations import config as weight
from tests.configurations import groups, preset, spec

WAYS = ("export_safetensors_model", "export_quark_model")
LAYER = "model.layers.0.self_attn.q_proj"
MSE = "PerGroupMSEObserver"
UINT4, INT4 = groups("uint4", False), groups("int4")


# The configuration of the model, another one, and what a message says of the two.
OTHERS = {
    "uint4 given int4": (weight(UINT4), weight(INT4), "dtype=int4.*dtype=uint4"),
    "int4 given uint4": (weight(INT4), weight(UINT4), "dtype=uint4.*dtype=int4"),
    "MXFP6": (preset("mxfp6_e2m3"), preset("mxfp6_e3m2"), "e3m2.*e2m3"),
    "scales": (preset("mxfp4_weight_only"), weight(groups("fp4", None)), "scale_format=None.*e8m0"),
    "groups": (weight(groups("int4", size=16)), weight(INT4), "group_size=32.*group_size=16"),
    "symmetry": (weight(INT4), weight(groups("int4", False)), "symmetric=False.*symmetric=True"),
    "inputs": (preset("int8"), preset("int8_wo"), "input_tensors.*float.*int8"),
    "dynamic inputs": (preset("int8"), preset("ptpc_int8"), "per_channel"),
    "an excluded layer": (weight(INT4), weight(INT4, exclude=["*q_proj"]), "says float.*int4"),
    "rotation": (weight(INT4), weight(INT4, algo_config=[RotationConfig(r4=True)]), "rotates"),
}


@pytest.fixture
def files(tmp_path):
    """Export a model; the files by name but for those that hold digests."""

    def files(model, name, **options):
        ModelExporter(tmp_path / name).export_safetensors_model(model, **options)
        return {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()}

    return files


class TestAnother:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("case", OTHERS)
    def test_is_refused_before_anything_is_written(self, build, quantize, tmp_path, case, way):
        own, other, said = OTHERS[case]
        model = quantize(build(), own)
        with pytest.raises(ValueError, match=said) as error:
            getattr(ModelExporter(tmp_path / "out"), way)(model, quant_config=other)
        assert case == "rotation" or LAYER in str(error.value)
        assert "Leave quant_config out" in str(error.value)
        assert not list(tmp_path.iterdir())

    def test_is_refused_for_an_imported_model(self, build, quantize, tmp_path, files):
        files(quantize(build(), weight(UINT4)), "one")
        model = ModelImporter(tmp_path / "one", "safetensors").import_model_info(build())
        with pytest.raises(ValueError, match="dtype=int4"):
            files(model, "two", quant_config=weight(INT4))
        assert [path.name for path in tmp_path.iterdir()] == ["one"]

    def test_is_refused_by_a_format_of_other_software(self, build, quantize, files):
        with pytest.raises(ValueError, match="dtype=uint4"):
            files(
                quantize(build(), weight(INT4)), "x", custom_mode="awq", quant_config=weight(UINT4)
            )


SAME = {
    "patterns": (
        weight(INT4),
        Config(layer_quant_config={"*proj": QuantizationConfig(weight=INT4)}),
    ),
    "an axis from the end": (weight(INT4), weight(replace(INT4, ch_axis=-1))),
    "a scale of squared error": (weight(INT4), weight(replace(INT4, observer_cls=MSE))),
    "a rounding": (weight(INT4), weight(replace(INT4, round_method="floor"))),
    "type of the layers": (
        preset("int8"),
        Config(layer_type_quant_config={torch.nn.Linear: scheme("int8")}, exclude=["lm_head"]),
    ),
    "scale of one row": (
        weight(spec("int8", "per_channel", ch_axis=0)),
        weight(spec("int8", "per_channel", ch_axis=-2)),
    ),
}


class TestTheSame:
    @pytest.mark.parametrize("case", SAME)
    def test_is_written_so_that_the_model_is_read_back(
        self, build, quantize, logits, tmp_path, files, case
    ):
        own, other = SAME[case]
        model = quantize(build(), own)
        files(model, "out", quant_config=other)
        read = ModelImporter(tmp_path / "out", "safetensors").import_model_info(build())
        assert logits(read).equal(logits(model))

    @pytest.mark.parametrize("algorithm", [AWQConfig(), RotationConfig(r1=False, r4=True)])
    def test_may_have_the_options_of_an_algorithm(self, build, quantize, files, algorithm):
        config = weight(INT4, algo_config=[algorithm])
        model = quantize(build(), config)
        assert files(model, "given", quant_config=config) == files(model, "own")

    def test_is_what_the_quantizer_got_whatever_was_left_in_float(self, quantize, files, build):
        """The head of GPT-NeoX has another name than ``lm_head``, which the model remembers."""
        config = preset("int8_wo")
        model = quantize(build("gpt_neox"), config)
        assert files(model, "given", quant_config=config) == files(model, "own")

    def test_may_change_after_the_model_was_quantized(self, build, quantize, files):
        """The model remembers a copy: a changed object is compared with the layers again."""
        config = weight(UINT4)
        model = quantize(build(), config)
        config.global_quant_config = QuantizationConfig(weight=INT4)
        with pytest.raises(ValueError, match="dtype=int4"):
            files(model, "x", quant_config=config)

    def test_may_have_groups_that_were_fitted_to_the_model(self, build, tmp_path, logits, files):
        given = weight(groups("uint4", False, size=128))  # groups of 128, and rows of 64 and 96
        model = build()
        fitted, sizes = fit_group_sizes(model, given)
        assert set(sizes.values()) == {64, 32}
        model = ModelQuantizer.freeze(ModelQuantizer(fitted).quantize_model(model))
        files(model, "out", quant_config=given)
        section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        entries = section["layer_quant_config"].values()
        assert {entry["weight"]["group_size"] for entry in entries} == {64, 32}
        read = ModelImporter(tmp_path / "out", "safetensors").import_model_info(build())
        assert logits(read).equal(logits(model))
