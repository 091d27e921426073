"""Checkpoints in the formats of other tools, through Transformers and what it loads them with."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch.export.conversion import convert
from quark.torch.export.recognition import load_checkpoint, open_checkpoint
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import ALIASES, scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.packed import PackedLayer
from tests.configurations import config, groups, preset, spec

# Widths that the kernels of the clients take.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
PARTLY = ("lm_head", "model.layers.1.mlp.down_proj")


@pytest.fixture
def load():
    from transformers import AutoModelForCausalLM

    def load(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", output_loading_info=True
        )
        assert not any(report.values()), report  # nothing missing, unexpected or mismatched
        return model

    return load


def test_fp8_blocks_on_a_cpu(build, quantize, export, load):
    """Transformers has no kernel there and multiplies weights by their scales."""
    weight = QuantizationSpec(
        "fp8_e4m3", qscheme="per_block", block_size=(32, 32), is_dynamic=False
    )
    inputs = QuantizationSpec(
        "fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True
    )
    model = quantize(build(), config(weight, inputs, PARTLY))
    loaded = load(export(model, custom_mode="fp8"))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
    assert len(layers) == 13
    for name, layer in layers.items():
        assert loaded.get_submodule(name).weight.equal(layer.weight), name


def test_mxfp8_on_a_cpu(build, quantize, export, load):
    """Transformers multiplies weights by their exponents there, and leaves inputs in float."""
    model = quantize(build(), preset("mxfp8", exclude=PARTLY))
    loaded = load(export(model, custom_mode="mxfp8"))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
    assert len(layers) == 13
    for name, layer in layers.items():
        assert loaded.get_submodule(name).weight.equal(layer.weight), name


@pytest.mark.client("compressed_tensors")
@pytest.mark.parametrize(
    "configuration",
    [
        *(config(groups(dtype), exclude=PARTLY) for dtype in ("int3", "int4", "int8")),
        config(groups("int4", signed_scales=True), exclude=PARTLY),
        *(Config(scheme(name, 32), exclude=["lm_head"]) for name in ("int8", "fp8", "ptpc_fp8")),
    ],
    ids=["int3", "int4", "int8 weights", "signed", "int8", "fp8", "ptpc_fp8"],
)
def test_compressed_tensors(build, quantize, export, load, logits, configuration):
    model = quantize(build(), configuration)
    loaded = load(export(model, custom_mode="compressed-tensors"))
    assert logits(loaded).equal(logits(model))


@pytest.mark.client("torchao")
@pytest.mark.parametrize(
    "configuration",
    [
        *(config(groups(dtype, dtype != "uint4")) for dtype in ("int2", "int3", "uint4", "int8")),
        config(groups("int4"), spec("int8", "per_channel", False, ch_axis=1, is_dynamic=True)),
        config(groups("int4"), layer_quant_config={"*down_proj": scheme("int8_wo")}),
        config(groups("int4", signed_scales=True)),
        preset("fp8_wo"),
    ],
    ids=["int2", "int3", "uint4", "int8", "int8 inputs", "several", "signed", "fp8"],
)
def test_torchao(build, quantize, export, load, logits, configuration):
    model = quantize(build(), configuration)
    loaded = load(export(model, custom_mode="torchao"))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert loaded.get_submodule(name).weight.dequantize().equal(layer.weight), name
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)


@pytest.mark.client("torchao")
@pytest.mark.parametrize("kind", ["int8", "int8 groups", "int8 inputs", "int4", "fp8"])
def test_what_torchao_writes(build, load, logits, tmp_path, kind):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
    )
    from transformers import AutoModelForCausalLM, TorchAoConfig

    options = {
        "int8": Int8WeightOnlyConfig(),
        "int8 groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int8 inputs": Int8DynamicActivationInt8WeightConfig(),
        "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32), MappingType.ASYMMETRIC),
        "fp8": Float8WeightOnlyConfig(),
    }[kind]
    build().save_pretrained(tmp_path / "float")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=TorchAoConfig(options)
    )
    theirs.save_pretrained(tmp_path / "ao")
    ours = load_checkpoint(tmp_path / "ao")
    layers = {n: m for n, m in ours.named_modules() if isinstance(m, PackedLayer)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert layer.value("weight").equal(theirs.get_submodule(name).weight.dequantize()), name
    if kind == "int8 inputs":  # the largest value of a token is a tie between two codes
        difference = logits(ours) - logits(theirs)
        assert difference.norm() < 0.05 * logits(theirs).norm()
    else:
        torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.client("compressed_tensors")
@pytest.mark.parametrize("name", [*ALIASES, "fp8", "mxfp4", "nvfp4"])
def test_names_of_compressed_tensors(name):
    """A scheme is what compressed-tensors calls by that name."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    theirs, ours = preset_name_to_scheme(name.upper(), ["Linear"]), scheme(name)
    for a, b in ((theirs.weights, ours.weight), (theirs.input_activations, ours.input_tensors)):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert (a.num_bits, str(a.type).endswith("float")) == (b.fmt.bits, b.fmt.is_float)
        assert a.symmetric == b.scheme.symmetric
        assert bool(a.dynamic) == bool(b.is_dynamic)
        if a.group_size:
            assert a.group_size == b.scheme.group
        else:
            assert str(a.strategy).rpartition(".")[2].lower() == (
                "token" if b.is_dynamic else b.qscheme.value[4:]
            )


@pytest.mark.client("gptqmodel")
@pytest.mark.parametrize(
    ("mode", "dtype", "symmetric", "rest"),
    [
        ("awq", "uint4", False, {}),
        ("awq", "int4", True, {}),
        ("awq", "int4", True, {"signed_scales": True}),
        ("gptq", "int4", True, {}),
        ("gptq", "int4", True, {"signed_scales": True}),
        ("gptq", "uint4", False, {}),
        ("gptq", "int3", True, {}),
        ("gptq", "int8", True, {}),
    ],
)
@pytest.mark.sampled(2)
def test_gptqmodel(build, quantize, export, load, logits, mode, dtype, symmetric, rest):
    """Its kernels compute in float16 and bfloat16."""
    model = quantize(build(**WIDE), config(groups(dtype, symmetric, **rest), exclude=PARTLY))
    loaded = load(export(model, custom_mode=mode))
    assert type(loaded.model.layers[1].mlp.down_proj) is torch.nn.Linear
    assert type(loaded.model.layers[0].mlp.down_proj) is not torch.nn.Linear
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0.05)


@pytest.mark.client("gptqmodel")
@pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("uint4", False)])
def test_gptqmodel_with_act_order(
    build, quantize, export, load, logits, tmp_path, dtype, symmetric
):
    """The order is made by hand: it is read here, written again, and read by the client."""
    path = export(
        quantize(build(**WIDE), config(groups(dtype, symmetric), exclude=PARTLY)),
        custom_mode="gptq",
    )
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("g_idx")]:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]))]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = open_checkpoint(path).fill()
    convert(path, tmp_path / "out", "gptq")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=0, atol=0.05)
