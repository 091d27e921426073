"""Checkpoints of other tools: every stored bit read by the rules of its tool, and back here."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter, ModelImporter
from quark.torch.export.formats.layouts.dense_words import pack_words, unpack_words
from quark.torch.quantization.config.config import AWQConfig, GPTQConfig, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.configurations import config, groups, preset

LAYER = "model.layers.1.self_attn.k_proj"
CT = "compressed-tensors"
FP8 = QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=False)
CACHE = QuantizationConfig(output_tensors=FP8)
UINT8 = QuantizationSpec("uint8", qscheme="per_tensor", symmetric=False, is_dynamic=False)
WITH_CACHE = {"kv_cache_quant_config": {"*k_proj": CACHE, "*v_proj": CACHE}}


BLOCKS = config(
    QuantizationSpec("fp8_e4m3", qscheme="per_block", block_size=(32, 32), is_dynamic=False),
    QuantizationSpec("fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True),
)
DYNAMIC = config(FP8, QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=True))
EIGHT_BITS = QuantizationConfig(weight=groups("int8"))
PARTLY = ("lm_head", "*.1.mlp.down_proj", "*.0.self_attn.*")
SIGNED = groups("int4", signed_scales=True)
INT4_FP8 = config(groups("int4"), layer_quant_config={"*down_proj": scheme("fp8", 32)})

# Name -> (mode, configuration): what each mode can hold.
CASES = {
    "awq uint4": ("awq", config(groups("uint4", False))),
    "awq int4": ("awq", config(groups("int4"))),
    "awq float16 scales": ("awq", config(groups("uint4", False, scale_type="float16"))),
    "awq in part": ("awq", config(groups("uint4", False), exclude=PARTLY)),
    **{
        f"gptq {dtype}": ("gptq", config(groups(dtype)))
        for dtype in ("int2", "int3", "int4", "int8")
    },
    **{
        f"gptq {dtype}": ("gptq", config(groups(dtype, False)))
        for dtype in ("uint2", "uint3", "uint4", "uint8")
    },
    "gptq per channel": ("gptq", config(groups("int4", size=None))),
    "gptq in part": ("gptq", config(groups("uint4", False), exclude=PARTLY)),
    **{f"mlx {d}": ("mlx", config(groups(d, d == "int4"))) for d in ("uint3", "int4")},
    **{f"ao {n}": ("torchao", preset(n)) for n in ("uint4_wo_32", "ptpc_int8", "ptpc_fp8")},
    **{f"{mode} signed": (mode, config(SIGNED)) for mode in ("awq", "gptq", "mlx", CT)},
    "ct int4": (CT, config(groups("int4"))),
    "ct uint4": (CT, config(groups("uint4", False))),
    **{f"ct {dtype}": (CT, config(groups(dtype))) for dtype in ("int3", "int5", "int6", "int7")},
    "ct int7 asymmetric": (CT, config(groups("int7", False))),
    "ct int4 with int8 inputs": (CT, preset("w_int4_per_group_a_int8_per_token_dynamic")),
    "ct uint4 with int8 inputs": (CT, preset("w_uint4_per_token_a_int8_per_channel")),
    "ct int4 with fp8 inputs": (CT, preset("w_int4_per_group_a_fp8_per_token_dynamic")),
    "ct int8 weights": (CT, config(groups("int8", size=None))),
    "ct int4 per channel": (CT, config(groups("int4", False, size=None))),
    "ct int8": (CT, preset("int8")),
    "ct int8 asymmetric inputs": (
        CT,
        config(
            groups("int8", size=None),
            QuantizationSpec("int8", qscheme="per_tensor", symmetric=False, is_dynamic=False),
        ),
    ),
    "ct int8 per token": (CT, preset("ptpc_int8")),
    "ct fp8": (CT, preset("fp8", **WITH_CACHE, kv_cache_post_rope=True)),
    "ct fp8 weights": (CT, config(FP8)),
    "ct fp8 per token": (CT, preset("ptpc_fp8")),
    "ct fp8 blocks": (CT, BLOCKS),
    "ct mxfp4": (CT, preset("mxfp4")),
    "ct mxfp4 weights": (CT, preset("mxfp4_weight_only")),
    "ct mxfp6": (CT, preset("mxfp6_e2m3")),
    "ct mxfp8": (CT, preset("mxfp8")),
    "ct mxfp4 with mxfp8 inputs": (CT, preset("w_mxfp4_a_mxfp8")),
    "ct several": (CT, INT4_FP8),
    "ct int8 of two kinds": (CT, preset("int8", layer_quant_config={"*down_proj": EIGHT_BITS})),
    "modelopt fp8": ("modelopt", preset("fp8", **WITH_CACHE)),
    "modelopt nvfp4": ("modelopt", preset("nvfp4", **WITH_CACHE)),
    "modelopt nvfp4 weights": ("modelopt", preset("nvfp4_weight_only")),
    "modelopt mxfp8": ("modelopt", preset("mxfp8")),
    "mxfp8": ("mxfp8", preset("mxfp8")),
    "fp8": ("fp8", preset("fp8")),
    "fp8 dynamic": ("fp8", DYNAMIC),
    "fp8 with cache": ("fp8", preset("fp8", **WITH_CACHE)),
    "fp8 blocks": ("fp8", BLOCKS),
}

PACKED_ROWS = ["ct int4", "ct uint4", *(f"ct int{bits}" for bits in (3, 5, 6, 7))]
PACKED_ROWS += ["ct int7 asymmetric", "ct int8 weights"]


@pytest.fixture(scope="module")
def made(build, quantize, tmp_path_factory):
    """A frozen model and its checkpoint, once per case."""
    done = {}

    def made(case):
        if case not in done:
            mode, configuration = CASES[case]
            model = quantize(build(), configuration)
            path = tmp_path_factory.mktemp("made") / "model"
            ModelExporter(path).export_safetensors_model(model, custom_mode=mode)
            done[case] = model, path
        return done[case]

    return made


def section_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def stored_of(path):
    return load_file(path / "model.safetensors")


def bits_of(words, bits, count):
    """Codes in rows of 32-bit words, the first in the lowest bits: read as one long number."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([number >> (bits * i) & ((1 << bits) - 1) for i in range(count)])
    return torch.tensor(rows)


def interleaved(words):
    """Eight 4-bit codes of each word in the order of AWQ."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # position of each code in its word
    codes = (words.unsqueeze(-1).long() & 0xFFFFFFFF) >> (4 * order) & 15
    return codes.flatten(-2)


def spread(parts, inputs):
    """Groups (outputs, groups) to inputs (outputs, inputs)."""
    return parts.repeat_interleave(inputs // parts.shape[1], 1)


class TestAway:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.sampled(4)
    def test_what_is_imported_computes_what_was_exported(self, made, build, logits, case):
        model, path = made(case)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        assert not logits(model).equal(logits(build()))
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.sampled(3)
    def test_what_is_exported_again_is_the_same(self, made, build, tmp_path, case):
        _, path = made(case)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        again = tmp_path / "again"
        ModelExporter(again).export_safetensors_model(loaded, custom_mode=CASES[case][0])
        one, two = stored_of(path), stored_of(again)
        assert one.keys() == two.keys()
        assert all(tensor.double().equal(two[name].double()) for name, tensor in one.items())
        assert section_of(again) == section_of(path)

    def test_the_native_format_takes_them_too(self, build, quantize, logits, tmp_path):
        model = quantize(build(), CASES["awq int4"][1])
        ModelExporter(tmp_path / "native").export_quark_model(model, custom_mode="awq")
        loaded = ModelImporter(tmp_path / "native").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("mode", ["awq", "gptq", CT])
    def test_experts(self, build, quantize, export, logits, mode):
        """Routers stay in float, and layers go by the names that the checkpoint has."""
        several = {"num_local_experts": 4, "num_experts_per_tok": 2}
        model = quantize(build("mixtral", **several), config(groups("uint4", False)))
        path = export(model, custom_mode=mode)
        stored, section = stored_of(path), json.dumps(section_of(path))
        prefix = "model.layers.1.block_sparse_moe"
        last = "weight_packed" if mode == CT else "qweight"
        assert {f"{prefix}.experts.3.w2.{last}", f"{prefix}.gate.weight"} <= stored.keys()
        assert (f"{prefix}.experts.3.w2" if mode == "gptq" else f"{prefix}.gate") in section
        empty = build("mixtral", device="meta", **several)
        loaded = ModelImporter(path, "safetensors").import_model_info(empty)
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("algorithm", [AWQConfig(), GPTQConfig()], ids=["awq", "gptq"])
    @pytest.mark.parametrize("mode", ["awq", "gptq", CT])
    def test_whatever_algorithm_found_the_weights(
        self, build, quantize, export, logits, algorithm, mode
    ):
        model = quantize(build(), config(groups("uint4", False), algo_config=[algorithm]))
        path = export(model, custom_mode=mode)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))

    def test_from_one_tool_to_another(self, made, build, logits, tmp_path):
        model, path = made("awq uint4")
        for i, mode in enumerate(("gptq", CT, "quark")):
            loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
            path = tmp_path / str(i)
            ModelExporter(path).export_safetensors_model(loaded, custom_mode=mode)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))

    def test_scales_of_nvfp4_lose_no_more_than_their_last_bit(
        self, build, quantize, export, tmp_path
    ):
        """Its scale of scales is stored as the reciprocal."""
        model = quantize(build(), preset("nvfp4"))
        path = export(model, custom_mode=CT)
        loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
        one, two = (m.get_submodule(LAYER).quantized_tensor("weight") for m in (model, loaded))
        assert one.codes.equal(two.codes)
        torch.testing.assert_close(one.scale_2, two.scale_2, rtol=2**-23, atol=0)
        stored = stored_of(path)
        assert stored[f"{LAYER}.weight_global_scale"].equal(1 / one.scale_2.reshape(1))


class TestBits:
    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith("awq")])
    def test_awq(self, made, case):
        model, path = made(case)
        tensors = stored_of(path)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
        for name, layer in layers.items():
            codes, zeros = (interleaved(tensors[f"{name}.{p}"]).T for p in ("qweight", "qzeros"))
            scale = tensors[f"{name}.scales"].float().T
            inputs = codes.shape[1]
            value = (codes - spread(zeros, inputs)) * spread(scale, inputs)
            assert value.equal(layer.weight), name
        quantized = {name.rpartition(".")[0] for name in tensors if name.endswith("qweight")}
        assert quantized == set(layers)  # norms and embeddings keep their names
        assert {"model.norm.weight", "lm_head.weight"} <= tensors.keys()

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith("gptq")])
    def test_gptq(self, made, case):
        model, path = made(case)
        tensors, section = stored_of(path), section_of(path)
        bits, layer = section["bits"], model.get_submodule(LAYER)
        outputs, inputs = layer.weight.shape
        codes = bits_of(tensors[f"{LAYER}.qweight"].T, bits, inputs)
        zeros = bits_of(tensors[f"{LAYER}.qzeros"], bits, outputs).T
        if section["checkpoint_format"] == "gptq":
            zeros = zeros + 1
        scale, group = tensors[f"{LAYER}.scales"].T, tensors[f"{LAYER}.g_idx"].long()
        assert ((codes - zeros[:, group]) * scale[:, group]).equal(layer.weight)

    @pytest.mark.parametrize("case", PACKED_ROWS)
    def test_packed_rows(self, made, case):
        model, path = made(case)
        tensors, weights = stored_of(path), section_of(path)["config_groups"]["group_0"]["weights"]
        bits, layer = weights["num_bits"], model.get_submodule(LAYER)
        outputs, inputs = layer.weight.shape
        assert tensors[f"{LAYER}.weight_shape"].tolist() == [outputs, inputs]
        codes = bits_of(tensors[f"{LAYER}.weight_packed"], bits, inputs)
        zeros = torch.tensor([[1 << (bits - 1)]])
        if not weights["symmetric"]:
            zeros = bits_of(tensors[f"{LAYER}.weight_zero_point"].T, bits, outputs).T
        scale = tensors[f"{LAYER}.weight_scale"]
        value = (codes - spread(zeros, inputs)) * spread(scale, inputs)
        assert value.equal(layer.weight)

    @pytest.mark.parametrize("case", ["ct int8", "ct fp8", "ct fp8 per token", "fp8", "fp8 blocks"])
    def test_values_times_scales(self, made, case):
        model, path = made(case)
        tensors, layer = stored_of(path), model.get_submodule(LAYER)
        name = "weight_scale_inv" if case == "fp8 blocks" else "weight_scale"
        scale = tensors[f"{LAYER}.{name}"]
        if case == "fp8 blocks":
            scale = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        assert (tensors[f"{LAYER}.weight"].float() * scale).equal(layer.weight)

    @pytest.mark.parametrize("case", ["ct fp8", "fp8 with cache"])
    def test_scales_of_a_cache_belong_to_the_attention(self, made, case):
        model, path = made(case)
        tensors = stored_of(path)
        for name in ("k", "v"):
            layer = model.get_submodule(f"model.layers.0.self_attn.{name}_proj")
            stored = tensors[f"model.layers.0.self_attn.{name}_scale"]
            assert stored.reshape(()).equal(layer.output_quantizer.scale)
        assert not any("output_scale" in name for name in tensors)

    @pytest.mark.parametrize("bits", range(2, 9))
    @pytest.mark.parametrize("count", [32, 20, 3])
    def test_words(self, bits, count):
        codes = torch.randint(0, 1 << bits, (5, count), dtype=torch.uint8)
        words = pack_words(codes, bits)
        assert words.shape == (5, -(-count * bits // 32))
        assert bits_of(words, bits, count).equal(codes.long())
        assert unpack_words(words, bits, count).equal(codes)


class TestSections:
    def test_awq(self, made):
        assert section_of(made("awq uint4")[1]) == {
            "bits": 4,
            "group_size": 32,
            "modules_to_not_convert": ["lm_head"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }

    def test_gptq_names_layers_where_others_of_a_block_are_in_float(self, made):
        assert "modules_in_block_to_quantize" not in section_of(made("gptq int4")[1])
        (names,) = section_of(made("gptq in part")[1])["modules_in_block_to_quantize"]
        assert LAYER in names and "model.layers.1.mlp.down_proj" not in names
        assert len(names) == 14 - 5

    @pytest.mark.parametrize(("case", "scheme"), [("gptq int4", "gptq"), ("gptq uint4", "gptq_v2")])
    def test_zero_points_of_gptq_are_unambiguous(self, made, case, scheme):
        section = section_of(made(case)[1])
        assert section["checkpoint_format"] == scheme
        assert section["sym"] is (scheme == "gptq")

    @pytest.mark.parametrize(
        ("case", "form"),
        [
            ("ct int4", "pack-quantized"),
            ("ct int8", "int-quantized"),
            ("ct fp8", "float-quantized"),
            ("ct mxfp4", "mxfp4-pack-quantized"),
            ("ct several", "mixed-precision"),
        ],
    )
    def test_compressed_tensors(self, made, case, form):
        section = section_of(made(case)[1])
        assert section["format"] == form and section["ignore"] == ["lm_head"]
        assert bool(section["kv_cache_scheme"]) is (case == "ct fp8")

    @pytest.mark.parametrize(
        ("case", "activations", "block"),
        [
            ("fp8", "static", None),
            ("fp8 dynamic", "dynamic", None),
            ("fp8 blocks", "dynamic", [32, 32]),
        ],
    )
    def test_fp8(self, made, case, activations, block):
        section = section_of(made(case)[1])
        assert section["activation_scheme"] == activations
        assert section["weight_block_size"] == block
        assert section["ignored_layers"] == ["lm_head"]


class TestSectionsThatAreNotRead:
    @pytest.mark.parametrize(
        ("case", "change", "said"),
        [
            ("awq int4", {"bits": 8}, "bits=8"),
            ("awq int4", {"version": "marlin"}, "version='marlin'"),
            ("awq int4", {"group_size": "32"}, "group_size='32' is not a positive"),
            ("awq int4", {"zero_point": None}, "zero_point=None"),
            ("gptq int4", {"group_size": 0}, "group_size=0 is not a positive"),
            ("gptq int4", {"sym": 1}, "sym=1"),
            ("gptq int4", {"dynamic": {"+:.*": {"bits": 6}}}, "bits=6"),
            ("gptq int4", {"modules_in_block_to_quantize": [[3]]}, "is not a list of names"),
            ("ct int4", {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
            (
                "ct int4",
                {"transform_config": {"config_groups": {"a": 1}}},
                "must map names to groups",
            ),
            ("ct int4", {"config_groups": {"a": 1}}, "config_groups must map names"),
            ("fp8 blocks", {"weight_block_size": [32]}, "not a pair of positive integers"),
            ("fp8", {"fmt": "e5m2"}, "fmt='e5m2'"),
            ("ct int4", {"format": "dense", "config_groups": {"g": {"targets": ["Linear"]}}}, "g"),
            ("ct int4", {"ignore": ["re:(a|b)"]}, "list the layers"),
            ("fp8", {"activation_scheme": "none"}, "activation_scheme='none'"),
        ],
    )
    def test_sections_that_are_not_read(self, made, build, tmp_path, case, change, said):
        _, path = made(case)
        read = json.loads((path / "config.json").read_text())
        read["quantization_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(read))
        with pytest.raises(ValueError, match=said):
            ModelImporter(tmp_path, "safetensors").import_model_info(build(device="meta"))


class TestReadAsOthersWriteThem:
    def test_names_left_out_by_default(self, made, build, logits, tmp_path):
        """AutoAWQ names nothing: it quantizes the layers of the blocks."""
        model, path = made("awq uint4")
        read = json.loads((path / "config.json").read_text())
        read["quantization_config"]["modules_to_not_convert"] = None
        (tmp_path / "config.json").write_text(json.dumps(read))
        save_file(stored_of(path), tmp_path / "model.safetensors")
        loaded = ModelImporter(tmp_path, "safetensors").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("ignore", ["re:.*lm_head", "re:^lm_head$", "re:lm_head.*"])
    def test_expressions(self, made, build, logits, tmp_path, ignore):
        model, path = made("ct int4")
        read = json.loads((path / "config.json").read_text())
        read["quantization_config"]["ignore"] = [ignore]
        (tmp_path / "config.json").write_text(json.dumps(read))
        save_file(stored_of(path), tmp_path / "model.safetensors")
        loaded = ModelImporter(tmp_path, "safetensors").import_model_info(build(device="meta"))
        assert logits(loaded).equal(logits(model))
