"""Formats with scales of blocks, of scales and of two stages, through checkpoints."""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelImporter
from quark.torch.quantization.config import spec_classes as make
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.packed import PackedLayer

ARCHIVE = Path(__file__).parents[1] / "data" / "golden_blocks.tar.xz"
GOLDEN = ["w_mxfp4", "w_mxfp6e3m2", "w_nvfp4_scalequant", "w_progressive_fp8_int4", "w_mx9_b16"]

GROUP16 = {"ch_axis": -1, "group_size": 16}
GROUP32 = {"ch_axis": -1, "group_size": 32}
FP8_TENSOR = make.FP8E4M3PerTensorSpec(is_dynamic=False)


def nvfp4(is_dynamic):
    first = make.FP4PerGroupSpec(**GROUP16, is_dynamic=is_dynamic)
    return make.ScaleQuantSpec(first, FP8_TENSOR)


def per_block(*block, **fields):
    return QuantizationSpec(
        "fp8_e4m3", qscheme="per_block", block_size=block, is_dynamic=False, **fields
    )


def int16(**fields):
    return QuantizationSpec("int16", symmetric=True, is_dynamic=False, **fields)


F32, U8, I8 = torch.float32, torch.uint8, torch.int8
I16, I32, F8 = torch.int16, torch.int32, torch.float8_e4m3fn
N, K = 32, 64  # of the key projection
FP4 = ((N, K // 2), U8)
FP6 = ((N, 3 * K // 4), U8)
EXPONENTS = ((N, K // 32), U8)
SCALES = ((N, K // 32), F32)

# Name -> (specification of the weight, what is stored of a key projection).
WEIGHTS = {
    "mxfp8_e4m3": (make.OCP_MXFP8E4M3Spec(ch_axis=-1), {"": ((N, K), F8), "scale": EXPONENTS}),
    "mxfp8_e5m2": (
        make.OCP_MXFP8E5M2Spec(ch_axis=-1),
        {"": ((N, K), torch.float8_e5m2), "scale": EXPONENTS},
    ),
    "mxfp6_e3m2": (make.OCP_MXFP6E3M2Spec(ch_axis=-1), {"": FP6, "scale": EXPONENTS}),
    "mxfp6_e2m3": (make.OCP_MXFP6E2M3Spec(ch_axis=-1), {"": FP6, "scale": EXPONENTS}),
    "mxfp4": (make.OCP_MXFP4Spec(ch_axis=-1), {"": FP4, "scale": EXPONENTS}),
    "mxfp4_searched": (make.OCP_MXFP4DiffsSpec(ch_axis=-1), {"": FP4, "scale": EXPONENTS}),
    "mxint8": (make.OCP_MXINT8Spec(ch_axis=-1), {"": ((N, K), I8), "scale": EXPONENTS}),
    "mx6": (make.MX6Spec(ch_axis=-1, block_size=16), None),
    "mx9": (make.MX9Spec(ch_axis=-1, block_size=16), None),
    "bfp16": (make.BFP16Spec(ch_axis=-1), {"": ((N, K), I8), "scale": ((N, K // 8), U8)}),
    "nvfp4": (nvfp4(False), {"": FP4, "scale": ((N, K // 16), F8), "scale_2": ((), F32)}),
    "progressive": (
        make.ProgressiveSpec(FP8_TENSOR, make.Int4PerChannelSpec(ch_axis=0)),
        {
            "": ((N, K // 8), I32),
            "scale": ((), F32),
            "scale_2": ((N,), F32),
            "zero_point_2": ((N // 8,), I32),
        },
    ),
    "progressive_group": (
        make.ProgressiveSpec(FP8_TENSOR, make.Int4PerGroupSpec(**GROUP32)),
        {
            "": ((K, N // 8), I32),
            "scale": ((), F32),
            "scale_2": ((K // 32, N), F32),
            "zero_point_2": ((K // 32, N // 8), I32),
        },
    ),
    "amdfp4": (make.AmdFP4Spec(**GROUP32), {"": FP4, "scale": EXPONENTS}),
    "fp4": (make.FP4PerGroupSpec(**GROUP32), {"": FP4, "scale": SCALES}),
    "fp6_e2m3": (make.FP6E2M3PerGroupSpec(**GROUP32), {"": FP6, "scale": SCALES}),
    "fp6_e3m2": (make.FP6E3M2PerGroupSpec(**GROUP32), {"": FP6, "scale": SCALES}),
    "fp8_group": (make.FP8E4M3PerGroupSpec(**GROUP32), {"": ((N, K), F8), "scale": SCALES}),
    "fp8_block_128": (per_block(128, 128), {"": ((N, K), F8), "scale": ((1, 1), F32)}),
    "fp8_block_ragged": (per_block(24, 40), {"": ((N, K), F8), "scale": ((2, 2), F32)}),
    "int16_channel": (
        int16(qscheme="per_channel", ch_axis=0),
        {"": ((N, K), I16), "scale": ((N,), F32), "zero_point": ((N,), I16)},
    ),
    "int16_group": (
        int16(qscheme="per_group", **GROUP32),
        {"": ((K, N), I16), "scale": ((K // 32, N), F32), "zero_point": ((K // 32, N), I16)},
    ),
    "int8_group": (
        make.Int8PerGroupSpec(**GROUP32),
        {"": ((K, N), I8), "scale": ((K // 32, N), F32), "zero_point": ((K // 32, N), I8)},
    ),
}
INPUTS = {
    "nvfp4": (nvfp4(False), nvfp4(True)),
    "mxfp4": (make.OCP_MXFP4Spec(ch_axis=-1), make.OCP_MXFP4Spec(ch_axis=-1)),
    "mxfp8": (make.OCP_MXFP8E4M3Spec(ch_axis=-1), make.OCP_MXFP8E5M2Spec(ch_axis=-1)),
    "bfp16": (make.BFP16Spec(ch_axis=-1), make.BFP16Spec(ch_axis=-1)),
    "fp8_block": (
        per_block(16, 32),
        make.FP8E4M3PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=True),
    ),
}
FORMATS = ["real_quantized", "fake_quantized"]
KEY = "model.layers.1.self_attn.k_proj"


def config(weight, inputs=None, **rest):
    given = {"weight": weight, "input_tensors": inputs}
    full = {
        name: s if s is None or isinstance(s, QuantizationSpec) else s.to_quantization_spec()
        for name, s in given.items()
    }
    return Config(global_quant_config=QuantizationConfig(**full), exclude=["lm_head"], **rest)


def stored_of(path, layer=KEY):
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    prefix = f"{layer}.weight"
    return {
        name.removeprefix(prefix).removeprefix("_"): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def same_tensors(one, two):
    """Check that two checkpoints hold the same, bit by bit."""
    one, two = (load_file(path / "model.safetensors") for path in (one, two))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (two[name].dtype, two[name].shape), name
        bits = [t.reshape(-1).view(torch.uint8) for t in (tensor, two[name])]
        assert bits[0].equal(bits[1]), name


def through_transformers(path):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.fixture(scope="module")
def frozen(build, quantize):
    """Quantize and freeze a Llama by a configuration, once per name."""
    made = {}

    def frozen(name, configuration):
        if name not in made:
            made[name] = quantize(build(), configuration)
        return made[name]

    return frozen


@pytest.fixture
def same_everywhere(build, logits):
    """Check that a checkpoint gives the model that was exported, bit by bit."""

    def same_everywhere(model, path):
        expected = logits(model)
        assert expected.isfinite().all()
        layers = {
            n: m.value("weight")
            for n, m in model.named_modules()
            if isinstance(m, FakeQuantizedLayer)
        }
        assert len(layers) == 14
        for loaded in (
            ModelImporter(path, "safetensors").import_model_info(build(device="meta")),
            through_transformers(path),
        ):
            for name, weight in layers.items():
                layer = loaded.get_submodule(name)
                assert isinstance(layer, PackedLayer)
                torch.testing.assert_close(layer.value("weight"), weight, rtol=0, atol=0)
            assert logits(loaded).equal(expected)
        return loaded

    return same_everywhere


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


class TestWeights:
    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("name", WEIGHTS)
    @pytest.mark.sampled(3)
    def test_frozen_and_loaded_are_equal(
        self, frozen, export, same_everywhere, build, logits, name, weight_format
    ):
        model = frozen(name, config(WEIGHTS[name][0]))
        assert not logits(model).equal(logits(build()))
        same_everywhere(model, export(model, weight_format=weight_format))

    @pytest.mark.parametrize("name", [name for name, row in WEIGHTS.items() if row[1]])
    def test_what_is_stored(self, frozen, export, name):
        weight, expected = WEIGHTS[name]
        stored = stored_of(export(frozen(name, config(weight))))
        assert {part: (tuple(t.shape), t.dtype) for part, t in stored.items()} == expected

    @pytest.mark.parametrize("name", WEIGHTS)
    def test_exported_again(self, frozen, export, name):
        first = export(frozen(name, config(WEIGHTS[name][0])))
        second = export(through_transformers(first))
        same_tensors(first, second)

    def test_scales_of_nvfp4(self, frozen, export, build):
        """The largest scale of a block is the largest float8, the rest is relative to it."""
        stored = stored_of(export(frozen("nvfp4", config(WEIGHTS["nvfp4"][0]))))
        weight = build().get_submodule(KEY).weight
        whole = weight.abs().max() / (6 * 448)
        assert stored["scale_2"] == whole
        blocks = weight.reshape(N, -1, 16).abs().amax(-1) / 6
        assert stored["scale"].float().max() == 448
        assert stored["scale"].float().equal((blocks / whole).to(F8).float())

    def test_exponents_of_mxfp4(self, frozen, export, build):
        stored = stored_of(export(frozen("mxfp4", config(WEIGHTS["mxfp4"][0]))))
        amax = build().get_submodule(KEY).weight.abs().reshape(N, -1, 32).amax(-1)
        mantissa, exponent = torch.frexp(amax)
        expected = exponent - 1 + (mantissa >= 0.875).int() - 2 + 127
        assert stored["scale"].int().equal(expected)


class TestInputs:
    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("name", INPUTS)
    def test_frozen_and_loaded_are_equal(
        self, frozen, export, same_everywhere, logits, name, weight_format
    ):
        weight, inputs = INPUTS[name]
        model = frozen(f"inputs {name}", config(weight, inputs))
        assert not logits(model).equal(logits(frozen(f"no inputs {name}", config(weight))))
        same_everywhere(model, export(model, weight_format=weight_format))

    def test_what_is_stored_of_nvfp4(self, frozen, export, build, batches):
        model = frozen("inputs nvfp4", config(*INPUTS["nvfp4"]))
        tensors = load_file(export(model) / "model.safetensors")
        of_inputs = {k: t for k, t in tensors.items() if "input" in k and "layernorm" not in k}
        assert {k.rpartition(".")[2] for k in of_inputs} == {"input_scale_2"}
        assert len(of_inputs) == 14
        seen = []
        plain = build()
        plain.get_submodule(KEY).register_forward_pre_hook(
            lambda _, x: seen.append(x[0].abs().max())
        )
        with torch.no_grad():
            for batch in batches:
                plain(batch)
        assert of_inputs[f"{KEY}.input_scale_2"] == torch.stack(seen).max() / (6 * 448)


class TestSharedScales:
    GROUPS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})

    @pytest.fixture
    def shared(self, frozen):
        groups = [[f"*{name}" for name in sorted(group)] for group in self.GROUPS]
        return frozen("shared", config(*INPUTS["nvfp4"], shared_scale_groups=groups))

    def test_one_scale_of_scales_for_fused_layers(self, shared, export, same_everywhere, build):
        path = export(shared)
        float_model = build()
        for i in range(2):
            for parent, group in zip(("self_attn", "mlp"), self.GROUPS, strict=True):
                names = [f"model.layers.{i}.{parent}.{member}" for member in group]
                amax = max(float_model.get_submodule(n).weight.abs().max() for n in names)
                found = [stored_of(path, name) for name in names]
                assert [f["scale_2"].item() for f in found] == [(amax / 2688).item()] * len(names)
                largest = sorted(f["scale"].float().max().item() for f in found)
                assert largest[0] < largest[-1] == 448  # relative to the shared one
        same_everywhere(shared, path)

    def test_layers_that_are_not_named_keep_their_own(self, shared, frozen, export):
        one, other = (
            load_file(export(model) / "model.safetensors")
            for model in (shared, frozen("inputs nvfp4", config(*INPUTS["nvfp4"])))
        )
        differ = {
            key.split(".")[-2]
            for key in one
            if key.endswith("weight_scale_2") and not one[key].equal(other[key])
        }
        assert {"q_proj", "k_proj"} & differ
        assert not differ & {"o_proj", "down_proj"}


class TestGolden:
    @pytest.mark.parametrize("way", ["importer", "transformers"])
    @pytest.mark.parametrize("case", GOLDEN)
    def test_recorded_logits(self, golden, case, way):
        from transformers import AutoConfig, AutoModelForCausalLM

        if way == "transformers":
            model = through_transformers(golden / case)
        else:
            architecture = AutoConfig.from_pretrained(golden / case)
            del architecture.quantization_config
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(architecture)
            model = ModelImporter(golden / case, "safetensors").import_model_info(model)
        expected = load_file(golden / f"{case}.logits")["logits"]
        with torch.no_grad():
            ids = load_file(golden / "inputs.safetensors")["input_ids"]
            found = model(ids).logits[:, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("case", ["w_mxfp4", "w_nvfp4_scalequant", "w_progressive_fp8_int4"])
    def test_written_again_byte_by_byte(self, golden, export, case):
        same_tensors(golden / case, export(through_transformers(golden / case)))
