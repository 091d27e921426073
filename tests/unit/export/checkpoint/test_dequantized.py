"""Quantized checkpoints as sources of float models: values, types, names, and damaged files."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch.export.recognition import load_checkpoint, load_in_float, open_dequantized
from quark.torch.quantization.config.config import QuantizationConfig, QuaRotConfig
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.configurations import config, groups, preset, quantized, spec

CT = "compressed-tensors"
FP8 = spec("fp8_e4m3")
TOKENS = groups("fp8_e4m3", None, is_dynamic=True)
BLOCKS = spec("fp8_e4m3", "per_block", block_size=(32, 32))
DYNAMIC = spec("fp8_e4m3", is_dynamic=True)

# Name -> checkpoint format, configuration.
CASES = {
    "fp8 per block": ("fp8", config(BLOCKS, TOKENS)),
    "fp8 per tensor": ("fp8", config(FP8, DYNAMIC)),
    "ct fp8 per channel": (CT, preset("ptpc_fp8")),
    "ct int4": (CT, config(groups("int4"))),
    "ct uint4": (CT, config(groups("uint4", False))),
    "ct int8": (CT, preset("int8_wo")),
    "ct mxfp4": (CT, preset("mxfp4_weight_only")),
    "ct nvfp4": (CT, preset("nvfp4_weight_only")),
    "awq": ("awq", config(groups("uint4", False), exclude=("lm_head", "*router*", "*.gate"))),
    "gptq": ("gptq", config(groups("int4"), exclude=("lm_head", "*router*", "*.gate"))),
    "quark int4": ("quark", preset("int4_wo_32")),
    "quark int4 fp8": ("quark", preset("int4_fp8")),
    "quark int4 int8": (
        "quark",
        config([spec("int8", symmetric=True), spec("int4", "per_channel", symmetric=True)]),
    ),
    "quark mxfp6": ("quark", preset("mxfp6_e3m2")),
}
MOES = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16},
}


def float_state(model):
    """The parameters of a model whose quantized layers hold values, by names of the float model."""
    return {
        name.replace("_quantizer", ""): value
        for name, value in model.state_dict().items()
        if "_quantizer." not in name
    }


def assert_same_values(model, frozen):
    """Check that a float model has the values of a frozen one, expert by expert."""
    assert not any(isinstance(m, FakeQuantizedLayer) for m in model.modules())
    split_experts(model)
    values, expected = model.state_dict(), float_state(frozen)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


class TestEveryFormat:
    @pytest.mark.parametrize("case", CASES)
    def test_a_dense_model_has_the_quantized_values(self, build, batches, export, case):
        mode, configuration = CASES[case]
        frozen = quantized(build(), configuration, batches)
        assert_same_values(load_in_float(export(frozen, custom_mode=mode)), frozen)

    @pytest.mark.parametrize("case", ["fp8 per block", "ct int4", "ct nvfp4", "gptq", "quark int4"])
    @pytest.mark.parametrize("name", MOES)
    @pytest.mark.sampled(3)
    def test_experts_are_stacked_again(self, build, batches, export, name, case):
        mode, configuration = CASES[case]
        frozen = quantized(build(name, **MOES[name]), configuration, batches)
        model = load_in_float(export(frozen, custom_mode=mode))
        assert model.model.layers[0].mlp.experts.down_proj.dim() == 3
        assert_same_values(model, frozen)

    def test_values_beside_scales(self, build, quantize, export):
        frozen = quantize(build(), "int4_wo_32")
        path = export(frozen, weight_format="fake_quantized")
        assert_same_values(load_in_float(path), frozen)

    def test_rotated_inputs_are_rotated_back(self, build, batches, export, logits):
        model = build(dtype=torch.float64)
        expected = logits(model)
        # 16-bit weights: only the rotations are left to see
        layers = QuantizationConfig(weight=groups("int16", size=None))
        rotation = QuaRotConfig(r1=False, r2=False, r3=False, r4=True)
        frozen = quantized(model, preset(layers, rotation), batches)
        assert any(m.input_rotation is not None for m in frozen.modules() if hasattr(m, "frozen"))
        source = load_in_float(export(frozen))
        assert torch.allclose(logits(source), expected, atol=2e-3)


class TestTypes:
    def test_quantized_weights_have_the_type_of_the_model(self, build, quantize, export):
        path = export(quantize(build(dtype=torch.bfloat16), "fp8"))
        assert {p.dtype for p in load_in_float(path).parameters()} == {torch.bfloat16}

    def test_another_type_is_rounded_once(self, build, quantize, export):
        path = export(quantize(build(dtype=torch.bfloat16), "int4_wo_32"))
        stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
        exact = load_checkpoint(path).model.layers[0].mlp.up_proj.value("weight", torch.float32)
        wide = load_in_float(path, "float32").state_dict()
        assert torch.equal(wide[name], exact)
        assert torch.equal(load_in_float(path, "float16").state_dict()[name], exact.half())
        assert wide["model.norm.weight"].dtype == torch.float32
        assert torch.equal(wide["model.norm.weight"], stored["model.norm.weight"].float())

    def test_headers_are_those_of_the_tensors(self, build, quantize, export):
        path = export(quantize(build("mixtral", **MOES["mixtral"]), "fp8"))
        model, reader = open_dequantized(path)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert reader.entries.keys() == model.state_dict().keys()
        for name, tensor in reader.tensors():
            assert (tuple(tensor.shape), tensor.dtype) == reader.entries[name][1:3]
            assert torch.equal(reader.tensor(name), tensor)

    def test_tied_weights_stay_tied(self, build, quantize, export):
        path = export(quantize(build(tie_word_embeddings=True), "fp8"))
        model = load_in_float(path)
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
def test_the_streamed_model_gives_the_same_files(build, quantize, export, kind):
    exclude = () if kind == "tied" else ("lm_head",)  # a head in codes is stored apart
    source = export(quantize(build(kind, **MOES.get(kind, {})), preset("fp8", exclude=exclude)))
    paths = [
        export(quantize(load_in_float(source, max_memory=memory), "int4_wo_32"))
        for memory in (None, 1 << 40)
    ]
    stored = [(path / "model.safetensors").read_bytes() for path in paths]
    assert stored[0] == stored[1]
    before, after = (load_in_float(path).lm_head.weight for path in (source, paths[1]))
    assert torch.equal(before, after)


def test_settings_of_generation_are_kept(build, quantize, export):
    model = build()
    model.generation_config.max_new_tokens = 7
    path = export(quantize(model, "fp8"))
    assert load_in_float(path).generation_config.max_new_tokens == 7
    assert load_checkpoint(path).generation_config.max_new_tokens == 7


def test_values_that_overflow_are_refused(build, quantize, export):
    """In memory and in parts: a scale of 1e38 is finite, 7 times it is not."""
    path = export(quantize(build(), "int4_wo_32"))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[f"{name}_scale"].flatten()[0] = 1e38
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} has NaN or infinite values"):
        load_in_float(path)
    streamed = load_in_float(path, max_memory=1 << 40)
    with pytest.raises(ValueError, match=rf"{name} has NaN or infinite values"):
        streamed(torch.zeros(1, 2, dtype=torch.long))
