"""Groups of compressed-tensors that are read but not written, and groups that are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter, ModelImporter, import_model_from_safetensors
from quark.torch.export.containers.base import get_container
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import config, groups, preset

CT = "compressed-tensors"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
GROUPED = QuantizationSpec(
    "fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True
)
PER_TOKEN = scheme("ptpc_fp8").input_tensors
ARGS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4, MXFP4 = groups("int4"), scheme("mxfp4_weight_only").weight
W4A8 = preset("w_int4_per_group_a_int8_per_token_dynamic")
# What is written, the input_activations that take the place of those, and what the model is then.
READ = {
    "int4 in bytes, fp8 inputs": (W4A8, FP8 | {"strategy": "token"}, config(INT4, PER_TOKEN)),
    "int4 in bytes, no inputs": (W4A8, None, config(INT4)),
    "MXFP4, fp8 inputs per group": (
        config(MXFP4),
        FP8 | {"strategy": "group", "group_size": 32},
        config(MXFP4, GROUPED),
    ),
    "MXFP4, fp8 inputs per token": (
        config(MXFP4),
        FP8 | {"strategy": "token"},
        config(MXFP4, PER_TOKEN),
    ),
    "words, int8 inputs": (
        config(groups("int8")),
        {"num_bits": 8, "strategy": "token", "dynamic": True},
        config(groups("int8"), scheme("ptpc_int8").input_tensors),
    ),
}


@pytest.fixture
def written(build, quantize, tmp_path):
    """Write a checkpoint, and change its only group."""

    def written(configuration, **changes):
        path = tmp_path / "model"
        model = quantize(build(), configuration)
        ModelExporter(path).export_safetensors_model(model, custom_mode=CT)
        described = json.loads((path / "config.json").read_text())
        described["quantization_config"]["config_groups"]["group_0"] |= changes
        (path / "config.json").write_text(json.dumps(described))
        return path

    return written


@pytest.mark.parametrize("case", READ)
def test_is_read(written, build, quantize, logits, case):
    own, inputs, meaning = READ[case]
    path = written(own, input_activations=inputs)
    expected = quantize(build(), meaning)
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert logits(loaded).equal(logits(expected))
    in_float = import_model_from_safetensors(None, path, device="cpu", dequantize=True)
    for name, layer in in_float.named_modules():
        if name.endswith("_proj"):
            assert layer.weight.equal(expected.get_submodule(name).weight), name


def test_codes_in_bytes_are_counted_one_by_one(written):
    """Codes of 4 bits take 8 bits each there, and a scale of 32 bits for each 32 of them."""
    contents = get_container(SAFETENSORS).contents(written(W4A8))
    [group] = contents.summary.schemes()
    blocks = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    assert (group.weights, group.bits_per_weight) == (blocks, 9)


REFUSED = {
    "outputs": ({"output_activations": {"num_bits": 8}}, "output_activations with num_bits=8"),
    "inputs": (
        {"input_activations": {"strategy": "channel", "num_bits": 8}},
        r"input_activations with num_bits=8, type=int, strategy=channel.*in the format",
    ),
    "wide inputs": (
        {"input_activations": {"num_bits": 16, "type": "float", "strategy": "token"}},
        "input_activations with num_bits=16, type=float, strategy=token",
    ),
    "weights": ({"format": "float-quantized"}, "weights with num_bits=4.*'float-quantized'"),
    "wide weights": ({"weights": {"num_bits": 9}}, "weights with num_bits=9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_part_that_cannot_be_read_is_named(written, build, case):
    changes, said = REFUSED[case]
    path = written(config(INT4), **changes)
    with pytest.raises(ValueError, match=said) as error:
        ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert "Load the checkpoint with compressed-tensors" in str(error.value)
    assert "{" not in str(error.value)


def test_what_is_read_alone_is_not_written(written, build, tmp_path):
    path = written(config(MXFP4), input_activations=READ["MXFP4, fp8 inputs per group"][1])
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    with pytest.raises(ValueError, match="its weight is fp4 per_group and its input is fp8_e4m3"):
        ModelExporter(tmp_path / "x").export_safetensors_model(loaded, custom_mode=CT)


class TestGroupsOfInputs:
    """``weight_g_idx`` gives the group of each input; without it, codes get other scales."""

    @pytest.fixture
    def with_groups(self, written):
        """Write a checkpoint in which some layers store the groups of their inputs."""

        def with_groups(layers, **args):
            path = written(config(groups("int4")), weights=ARGS | args)
            file = path / "model.safetensors"
            tensors = load_file(file)
            for name in [n for n in tensors if n.endswith(".weight_packed") and layers(n)]:
                layer = name.removesuffix(".weight_packed")
                count = 32 * tensors[f"{layer}.weight_scale"].shape[1]
                tensors[f"{layer}.weight_g_idx"] = torch.arange(count, dtype=torch.int32) // 32
            save_file(tensors, file, metadata={"format": "pt"})
            return path

        return with_groups

    @pytest.mark.parametrize("actorder", ["group", "dynamic", True])
    def test_all_layers_have_them(self, with_groups, build, quantize, logits, actorder):
        loaded = load_checkpoint(with_groups(lambda name: True, actorder=actorder))
        assert logits(loaded).equal(logits(quantize(build(), config(groups("int4")))))

    @pytest.mark.parametrize("actorder", ["weight", "static", None, False])
    def test_none_has_them(self, with_groups, actorder):
        load_checkpoint(with_groups(lambda name: False, actorder=actorder))

    @pytest.mark.parametrize("actorder", ["group", "dynamic", True, "weight", None])
    def test_one_layer_lacks_them(self, with_groups, actorder):
        path = with_groups(lambda name: "1.mlp.down_proj" not in name, actorder=actorder)
        for load in (load_checkpoint, load_in_float):
            with pytest.raises(ValueError, match=r"1.mlp.down_proj.weight_g_idx is missing"):
                load(path)

    @pytest.mark.parametrize("actorder", ["group", "dynamic", True])
    def test_all_layers_lack_them(self, with_groups, actorder):
        path = with_groups(lambda name: False, actorder=actorder)
        with pytest.raises(ValueError, match=r"weight_g_idx is missing.*Copy the whole checkpoint"):
            load_checkpoint(path)

    def test_another_group_of_layers_has_none(self, with_groups):
        path = with_groups(lambda name: "mlp" not in name, actorder="group")
        described = json.loads((path / "config.json").read_text())
        by_name = described["quantization_config"]["config_groups"]
        by_name["group_1"] = by_name["group_0"] | {"targets": ["re:.*mlp.*"], "weights": ARGS}
        (path / "config.json").write_text(json.dumps(described))
        load_checkpoint(path)
