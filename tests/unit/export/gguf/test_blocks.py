"""Blocks of ggml, against the package of llama.cpp."""

import copy
from dataclasses import replace

import pytest
import torch

from quark.torch.export.gguf.block_types import BLOCK_TYPES
from quark.torch.export.gguf.blocks import block_spec, block_type, pack_blocks, unpack_blocks
from quark.torch.quantization.config.algo import AutoRoundConfig
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES
from quark.torch.quantization.config.config import AWQConfig, GPTQConfig, QronosConfig
from quark.torch.quantization.config.presets import scheme
from tests.configurations import config, preset

gguf = pytest.importorskip("gguf")

K_QUANTS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


def any_blocks(kind, count=4, rows=8):
    """Blocks of random bytes, with numbers that are finite: of both signs, small, and zero."""
    form = BLOCK_TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (rows, count, form.bytes), generator=generator)
    blocks, start = blocks.to(torch.uint8), 0
    for part in form.parts:
        width = form.part_bytes(part)
        here = blocks[..., start : start + width]
        if part in ("scale", "minimum"):
            halves = (torch.randn(rows, count, 1, generator=generator) / 100).half()
            halves[0], halves[1, 0] = 2.0**-24, 0
            here[:] = halves.view(torch.uint8)
        elif part == "scales" and kind == "MXFP4":
            here[:] = torch.randint(100, 140, here.shape, generator=generator)
        elif part == "scales":
            here[:] = torch.randint(0, 128, here.shape, generator=generator)  # 0x7F is zero
            here[0], here[1], here[2] = 0, 0x7F, 1
        elif part == "factors":
            here[2, :, 3:9] = 0
        start += width
    return blocks.reshape(rows, -1)


def values(blocks, kind):
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
class TestAnyBlocks:
    def test_values_are_those_of_the_package(self, kind):
        blocks, form = any_blocks(kind), BLOCK_TYPES[kind]
        state = unpack_blocks(blocks, block_spec(kind, blocks, "x"), kind)
        read, expected = state.value(torch.float32), values(blocks, kind)
        assert state.scale.isfinite().all()
        if form.scheme.has_minima:  # a zero point is a quotient, which is rounded
            largest = expected.reshape(len(blocks), -1, form.size).abs().amax(-1, keepdim=True)
            error = (read - expected).reshape(*largest.shape[:2], -1).abs()
            assert (error <= 2.0**-20 * largest + 1e-12).all()
        else:
            assert read.equal(expected)

    def test_packed_blocks_have_the_same_values(self, kind):
        blocks, form = any_blocks(kind), BLOCK_TYPES[kind]
        spec = block_spec(kind, blocks, "x")
        if form.scheme.has_minima and not form.scheme.has_super_blocks:
            assert block_type(spec, 4 * form.size) is None  # minima that no integer code gives
            return
        assert block_type(spec, 4 * form.size) == kind
        packed = pack_blocks(unpack_blocks(blocks, spec, kind), kind)
        assert values(packed, kind).equal(values(blocks, kind))


@pytest.mark.parametrize("name", BLOCK_SCHEMES)
def test_the_package_reads_what_a_scheme_gives(quantize, name):
    layer = torch.nn.Linear(512, 24)
    model = quantize(torch.nn.Sequential(layer), config(scheme(name).weight), None)
    kind = block_type(scheme(name).weight, 512)
    assert kind == name.upper()
    state = model[0].quantized_tensor("weight")
    read = values(pack_blocks(state, kind), kind)
    atol = state.scale.max() * 2**-6 if name in ("q4_1", "q5_1") else 1e-7  # of float16 minima
    torch.testing.assert_close(read, model[0].weight, rtol=0, atol=float(atol))
    assert block_type(scheme(name).weight, 96) == (None if name in K_QUANTS else kind)


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "iq4_nl"])
@pytest.mark.parametrize(
    "algorithm",
    [GPTQConfig(), QronosConfig(), AWQConfig(), AutoRoundConfig(iters=3)],
    ids=lambda options: options.name,
)
@pytest.mark.sampled(3)
def test_algorithms_keep_the_blocks(build, quantize, name, algorithm):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = quantize(build(**sizes), preset(name, algorithm))
    plain = quantize(build(**sizes), preset(name))
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        state = model.get_submodule(f"model.layers.0.{layer}").quantized_tensor("weight")
        read = values(pack_blocks(state, name.upper()), name.upper())
        torch.testing.assert_close(read, state.value(torch.float32), rtol=0, atol=1e-6)
        weight = model.get_submodule(f"model.layers.0.{layer}").weight
        assert not weight.equal(plain.get_submodule(f"model.layers.0.{layer}").weight)


@pytest.mark.parametrize("name", ["q2_k", "q4_k"])
def test_statistics_of_inputs_weight_the_errors(build, quantize, batches, name):
    """With the second moments of inputs, which an importance matrix has the diagonal of."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    place, inputs = "model.layers.0.self_attn.q_proj", []
    model = build(**sizes)
    with torch.no_grad():  # channels of several sizes
        model.model.layers[0].input_layernorm.weight.copy_(torch.logspace(-1, 1, 256))
    weight = model.get_submodule(place).weight.detach().clone()
    hook = model.get_submodule(place).register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    x = torch.cat([part.flatten(0, 1) for part in inputs])
    errors = []
    for algorithms in ([], [GPTQConfig()]):
        rounded = quantize(copy.deepcopy(model), preset(name, *algorithms))
        blocks = pack_blocks(rounded.get_submodule(place).quantized_tensor("weight"), name.upper())
        errors.append(float((x @ (values(blocks, name.upper()) - weight).T).square().sum()))
    assert errors[1] < 0.85 * errors[0], errors


def test_mxfp4_is_rounded_as_by_the_package(quantize):
    """It rounds to no K-quant, and to MXFP4 with exponents rounded down; zeros have no sign."""
    layer = torch.nn.Linear(512, 24, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(24, 512) * torch.logspace(-4, 4, 24).unsqueeze(1))
    number = gguf.GGMLQuantizationType.MXFP4
    theirs = torch.from_numpy(gguf.quantize(layer.weight.detach().numpy(), number))
    weight = replace(scheme("mxfp4_weight_only").weight, scale_calculation_mode="floor")
    model = quantize(torch.nn.Sequential(layer), config(weight), None)
    blocks = pack_blocks(model[0].quantized_tensor("weight"), "MXFP4")
    assert values(blocks, "MXFP4").equal(values(theirs, "MXFP4"))
    assert blocks[:, ::17].equal(theirs[:, ::17])  # the exponents
    for name in [*K_QUANTS, "iq4_nl", "nvfp4"]:
        with pytest.raises(NotImplementedError):
            gguf.quantize(layer.weight.detach().numpy(), gguf.GGMLQuantizationType[name.upper()])


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0"])
def test_rounding_loses_no_more_than_that_of_the_package(quantize, name):
    """Scales have the sign of the value with the code -8 there too; it does not do so for Q8_0."""
    layer = torch.nn.Linear(1024, 64, bias=False)
    with torch.no_grad():
        layer.weight.normal_()
    weight = layer.weight.detach().clone()
    theirs = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[name.upper()])
    model = quantize(torch.nn.Sequential(layer), preset(name), None)
    blocks = pack_blocks(model[0].quantized_tensor("weight"), name.upper())
    errors = [
        float((values(read, name.upper()) - weight).square().mean())
        for read in (blocks, torch.from_numpy(theirs))
    ]
    assert errors[0] < 1.0005 * errors[1], errors
    if name != "q8_0":
        own = [values(x, name.upper()) for x in (blocks, torch.from_numpy(theirs))]
        assert (own[0] == own[1]).float().mean() > 0.99


@pytest.mark.parametrize("name", K_QUANTS)
def test_searched_scales_are_in_super_blocks(quantize, name):
    layer, errors = torch.nn.Linear(512, 24), []
    for observer in ("PerGroupMinMaxObserver", "PerGroupMSEObserver"):
        spec = BLOCK_SCHEMES[name].spec(observer_cls=observer)
        model = quantize(torch.nn.Sequential(copy.deepcopy(layer)), config(spec), None)
        read = values(pack_blocks(model[0].quantized_tensor("weight"), name.upper()), name.upper())
        torch.testing.assert_close(read, model[0].weight, rtol=0, atol=1e-7)
        errors.append(float((read - layer.weight.detach()).square().sum()))
    assert errors[1] < errors[0]
