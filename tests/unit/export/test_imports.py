"""Checkpoints as other tools write them, which differ in more than their names."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter, ModelImporter
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import config, groups

LAYER = "model.layers.1.self_attn.k_proj"


FP8 = QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=False)
BLOCKS = config(
    QuantizationSpec("fp8_e4m3", qscheme="per_block", block_size=(32, 32), is_dynamic=False),
    QuantizationSpec("fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True),
)


@pytest.fixture
def altered(build, quantize, tmp_path):
    """Write a model, change tensors and configuration, and return both."""

    def altered(configuration, mode, tensors=None, **section):
        model, path = quantize(build(), configuration), tmp_path / "model"
        ModelExporter(path).export_safetensors_model(model, custom_mode=mode)
        stored = load_file(path / "model.safetensors")
        if tensors:
            tensors(stored)
        save_file({k: t.contiguous() for k, t in stored.items()}, path / "model.safetensors")
        described = json.loads((path / "config.json").read_text())
        found = described["quantization_config"] | section
        described["quantization_config"] = {k: v for k, v in found.items() if v != "absent"}
        (path / "config.json").write_text(json.dumps(described))
        return model, path

    return altered


@pytest.fixture
def read(build):
    return lambda path: ModelImporter(path, "safetensors").import_model_info(build(device="meta"))


def less_one(stored):
    """Zero points as AutoGPTQ stores them: each 4-bit number less one."""
    for name in [n for n in stored if n.endswith("qzeros")]:
        codes = torch.stack([stored[name] >> 4 * i & 15 for i in range(8)], -1)
        assert codes.min() > 0
        words = sum((codes[..., i] - 1 & 15).long() << 4 * i for i in range(8))
        stored[name] = (words - (words >> 31 << 32)).int()


class TestGptq:
    def test_zero_points_less_one_of_asymmetric_weights(self, altered, read, logits):
        model, path = altered(
            config(groups("uint4", False)), "gptq", less_one, checkpoint_format="gptq"
        )
        assert logits(read(path)).equal(logits(model))

    def test_a_zero_point_that_is_lost(self, altered, read):
        def lose(stored):
            stored[f"{LAYER}.qzeros"] = stored[f"{LAYER}.qzeros"] | 15

        _, path = altered(config(groups("uint4", False)), "gptq", lose, checkpoint_format="gptq")
        with pytest.raises(ValueError, match=rf"{LAYER}\.qzeros: .* have lost 0"):
            read(path)

    def test_symmetric_weights_with_plain_zero_points(self, altered, read, logits):
        def plain(stored):
            for name in [n for n in stored if n.endswith("qzeros")]:
                assert (stored[name] == 0x77777777).all()
                stored[name] = torch.full_like(stored[name], -0x77777778)

        model, path = altered(config(groups("int4")), "gptq", plain, checkpoint_format="gptq_v2")
        assert logits(read(path)).equal(logits(model))

    @pytest.mark.parametrize("stated", [True, False])
    def test_act_order_that_changes_nothing(self, altered, read, logits, stated):
        model, path = altered(config(groups("int4")), "gptq", desc_act=stated)
        assert logits(read(path)).equal(logits(model))

    @pytest.mark.parametrize("stated", [True, False])
    def test_inputs_in_another_order_whatever_is_stated(self, altered, read, stated):
        def turn(stored):
            stored[f"{LAYER}.g_idx"] = stored[f"{LAYER}.g_idx"].flip(0)

        model, path = altered(config(groups("int4")), "gptq", turn, desc_act=stated)
        before, after = (
            m.get_submodule(LAYER).quantized_tensor("weight") for m in (model, read(path))
        )
        codes = after.codes.int() - 8  # stored without sign
        assert codes.reshape(-1, 2, 32).equal(before.codes.int().reshape(-1, 2, 32).flip(1))
        assert after.scale.equal(before.scale)

    def test_layers_of_blocks_that_are_left_in_float(self, altered, read, logits):
        exclude = ("lm_head", "*.mlp.down_proj")
        configuration = config(groups("int4"), exclude=exclude)
        model, path = altered(configuration, "gptq", modules_in_block_to_quantize="absent")
        loaded = read(path)
        assert type(loaded.model.layers[0].mlp.down_proj) is torch.nn.Linear
        assert logits(loaded).equal(logits(model))

    def test_a_checkpoint_without_any_codes(self, altered, read):
        def decode(stored):
            for name in [n for n in stored if n.endswith("qweight")]:
                layer = name.removesuffix(".qweight")
                for part in ("qweight", "qzeros", "scales", "g_idx"):
                    size = stored.pop(f"{layer}.{part}").shape
                    size = (size[1], size[0] * 8) if part == "qweight" else size
                    stored |= {f"{layer}.weight": torch.ones(size)} if part == "qweight" else {}

        _, path = altered(config(groups("int4")), "gptq", decode)
        with pytest.raises(ValueError, match="every weight is stored in float"):
            read(path)


class TestAwq:
    @pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("uint4", False)])
    def test_zero_points_in_the_middle_are_symmetric(self, altered, read, dtype, symmetric):
        _, path = altered(config(groups(dtype, symmetric)), "awq")
        assert read(path).get_submodule(LAYER).quant_config.weight.symmetric is symmetric

    def test_scales_keep_their_type(self, altered, read, tmp_path):
        def halve(stored):
            for name in [n for n in stored if n.endswith("scales")]:
                stored[name] = stored[name].half()

        _, path = altered(config(groups("uint4", False, scale_type="float16")), "awq", halve)
        ModelExporter(tmp_path / "out").export_safetensors_model(read(path))
        again = load_file(tmp_path / "out" / "model.safetensors")
        one = load_file(path / "model.safetensors")[f"{LAYER}.scales"]
        assert again[f"{LAYER}.weight_scale"].dtype == torch.float16
        assert again[f"{LAYER}.weight_scale"].equal(one)


class TestCompressedTensors:
    def test_inputs_in_another_order(self, altered, build, read, logits, tmp_path):
        """Versions before 0.20 could write them; GPTQ still can."""

        def order(stored):
            for name in [n for n in stored if n.endswith(".weight_scale")]:
                groups_of_inputs = torch.arange(32 * stored[name].shape[1], dtype=torch.int32) // 32
                stored[name.replace("weight_scale", "weight_g_idx")] = groups_of_inputs
            stored[f"{LAYER}.weight_g_idx"] = torch.arange(64, dtype=torch.int32) % 2

        model, path = altered(config(groups("uint4", False)), "compressed-tensors", order)
        state = model.get_submodule(LAYER).quantized_tensor("weight")
        group = torch.arange(64) % 2
        weight = (state.codes.int() - state.zero_point[:, group].int()) * state.scale[:, group]
        model.get_submodule(LAYER).weight.data = weight
        assert logits(read(path)).equal(logits(model))
        ModelExporter(tmp_path / "out").export_safetensors_model(read(path), custom_mode="gptq")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written[f"{LAYER}.g_idx"].equal(group.int())
        assert logits(read(tmp_path / "out")).equal(logits(model))


class TestFp8:
    def test_blocks_whose_exceptions_nobody_lists(self, altered, read, logits):
        model, path = altered(BLOCKS, "fp8", ignored_layers="absent")
        loaded = read(path)
        assert type(loaded.lm_head) is torch.nn.Linear
        assert loaded.quant_config.exclude == ["lm_head"]
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_a_single_scale_of_any_shape(self, altered, read, logits, shape):
        def reshape(stored):
            for name in [n for n in stored if n.endswith("_scale")]:
                stored[name] = stored[name].reshape(shape)

        model, path = altered(config(FP8, FP8), "fp8", reshape)
        assert logits(read(path)).equal(logits(model))
