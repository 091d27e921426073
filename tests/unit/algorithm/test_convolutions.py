"""Algorithms on convolutions: they round what linear layers on the windows would round."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import Journal, ModelQuantizer
from quark.torch.algorithm import clipping, weight_rounding
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    SmoothQuantConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.preparation import quantized_layers
from tests.models.convolutions import (
    NETS,
    configured,
    images,
    int4,
    network,
    output_error,
    wave,
)
from tests.models.matrix import FAMILIES, outputs

ROUNDING = {
    "gptq": GPTQConfig,
    "gptaq": GPTAQConfig,
    "qronos": QronosConfig,
    "yaqa": YaqaConfig,
    "autoround": lambda: AutoRoundConfig(iters=16, lr=0.05),
}
SPECS = {
    "channels": int4(),
    "tensor": int4(qscheme="per_tensor", ch_axis=None),
    "groups": int4(1, qscheme="per_group", group_size=9),
    "asymmetric": int4(symmetric=False),
}


def whole(*shape, seed=3):
    """Random integers, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def frozen(model, spec, algorithm, data, **rest):
    config = configured(spec, algorithm, **rest)
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [data]))


def linear_twin(matrix, windows, spec, algorithm):
    """Return the rounded weight of a linear layer on windows."""
    layer = nn.Linear(matrix.shape[1], len(matrix), bias=False)
    layer.weight.data.copy_(matrix)
    return frozen(nn.Sequential(layer), spec, algorithm, windows.unsqueeze(0))[0].weight


# ---- the same bits as a linear layer on the windows ---------------------------------------------


@pytest.mark.parametrize("solver", ["gptq", "gptaq", "qronos"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_convolution_is_a_linear_layer_on_its_windows(solver, spec):
    layer, x = nn.Conv2d(4, 6, 3, 2, 1, dilation=2, bias=False), whole(5, 4, 9, 8)
    matrix = layer.weight.detach().flatten(1).clone()
    windows = F.unfold(x, 3, 2, 1, 2).transpose(1, 2).flatten(0, 1)
    expected = linear_twin(matrix, windows, spec, ROUNDING[solver]())
    found = frozen(nn.Sequential(layer), spec, ROUNDING[solver](), x)[0].weight
    assert torch.equal(found.flatten(1), expected)
    assert not torch.equal(expected, frozen_to_nearest(matrix, spec))


def frozen_to_nearest(matrix, spec):
    layer = nn.Linear(matrix.shape[1], len(matrix), bias=False)
    layer.weight.data.copy_(matrix)
    model = nn.Sequential(layer)
    ModelQuantizer.freeze(ModelQuantizer(configured(spec)).quantize_model(model))
    return layer.weight


@pytest.mark.parametrize("spec", [SPECS["channels"], SPECS["groups"]], ids=["channels", "groups"])
@pytest.mark.parametrize("groups", [2, 4], ids=["groups", "depthwise"])
def test_groups_are_linear_layers_on_their_own_channels(spec, groups):
    layer, x = nn.Conv2d(4, 8, 3, groups=groups, bias=False), whole(6, 4, 9, 8)
    weights = layer.weight.detach().flatten(1).clone().chunk(groups)
    parts = [F.unfold(part, 3).transpose(1, 2).flatten(0, 1) for part in x.chunk(groups, 1)]
    expected = [linear_twin(*pair, spec, GPTQConfig()) for pair in zip(weights, parts, strict=True)]
    found = frozen(nn.Sequential(layer), spec, GPTQConfig(), x)[0].weight
    assert torch.equal(found.flatten(1), torch.cat(expected))


def test_a_transposed_convolution_is_a_convolution_of_a_spread_input():
    layer, x = nn.ConvTranspose2d(4, 6, 3, 2, 1, bias=False), whole(5, 4, 6, 5)
    matrix = layer.weight.detach().transpose(0, 1).flatten(1).clone()
    spread = x.new_zeros(5, 4, 11, 9)
    spread[:, :, ::2, ::2] = x
    # The kernel is flipped: column (c, i, j) meets position (2 - i, 2 - j) of the window.
    windows = F.unfold(spread, 3, padding=1).transpose(1, 2).unflatten(2, (4, 3, 3))
    windows = windows.flip(3, 4).flatten(2).flatten(0, 1)
    expected = linear_twin(matrix, windows, int4(), GPTQConfig())
    found = frozen(nn.Sequential(layer), int4(1), GPTQConfig(), x)[0].weight
    assert torch.equal(found.transpose(0, 1).flatten(1), expected)


def test_other_scales_of_a_transposed_convolution():
    for spec in (int4(), int4(qscheme="per_tensor", ch_axis=None), int4(1)):
        layer, x = nn.ConvTranspose2d(4, 6, 3, groups=2), torch.randn(5, 4, 6, 5).cumsum(3)
        reference = nn.ConvTranspose2d(4, 6, 3, groups=2)
        reference.load_state_dict(layer.state_dict())
        before = nn.ConvTranspose2d(4, 6, 3, groups=2)
        before.load_state_dict(layer.state_dict())
        plain = ModelQuantizer(configured(spec)).quantize_model(nn.Sequential(before))
        found = frozen(nn.Sequential(layer), spec, GPTQConfig(), x)
        assert output_error(found, reference, x) < 0.8 * output_error(plain, reference, x)


def test_codes_are_those_of_the_values():
    layer = nn.Conv2d(4, 6, 3, groups=2)
    frozen(nn.Sequential(layer), SPECS["groups"], QronosConfig(), torch.randn(5, 4, 8, 8))
    value = layer.quantized_tensor("weight").value(torch.float32)
    assert layer.frozen and torch.equal(value, layer.weight)
    assert layer.weight_quantizer.scale.shape == (6, 2)


def test_the_range_of_each_filter_is_clipped(monkeypatch):
    layer, x = nn.Conv2d(4, 6, 3, groups=2, bias=False), torch.randn(5, 4, 8, 8)
    layer.weight.data[0, 0, 0, 0] = 0.6
    seen = []
    kept = clipping.weight_with_best_ranges
    monkeypatch.setattr(
        "quark.torch.algorithm.weight_rounding.weight_with_best_ranges",
        lambda *args: seen.append(kept(*args)) or seen[-1],
    )
    before = layer.weight.detach().clone()
    frozen(nn.Sequential(layer), int4(), GPTQConfig(), x)
    [clipped] = seen
    assert clipped.shape == before.shape and bool((clipped.abs() <= before.abs()).all())
    rounded = [layer.weight_quantizer.fake_quantize_copy(w) for w in (before, clipped)]
    errors = [
        (F.conv2d(x, w, groups=2) - F.conv2d(x, before, groups=2)).square().sum((0, 2, 3))
        for w in rounded
    ]
    assert bool((errors[1] < errors[0]).any()) and bool((errors[1] <= 1.1 * errors[0]).all())


# ---- whole networks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        *((name, solver) for name in NETS for solver in ("gptq", "qronos")),
        *(("U-Net", solver) for solver in ("gptaq", "yaqa", "autoround")),
        ("repeated", "yaqa"),
    ],
)
def test_networks_lose_less_than_by_rounding(name, solver):
    data, reference = images(), network(name)
    nearest = ModelQuantizer(configured(int4())).quantize_model(network(name))
    model = frozen(network(name), int4(), ROUNDING[solver](), data)
    share = output_error(model, reference, data) / output_error(nearest, reference, data)
    assert share < (1 if solver == "autoround" else 0.7)


def model_of(name):
    """A model of Transformers, and a batch for it."""
    if name == "wav2vec 2":
        return wave()
    cases = [*FAMILIES["vision"], *FAMILIES["encoder-decoder"]]
    [case] = [case for case in cases if case.name == name]
    return case.build(), case.batch()


@pytest.mark.parametrize(
    ("name", "count", "solver"),
    [
        ("ViT", 1, "gptq"),
        ("ConvNeXt", 6, "gptq"),
        ("ResNet", 10, "qronos"),
        ("Whisper", 2, "gptq"),
        ("wav2vec 2", 2, "yaqa"),
    ],
)
def test_convolutions_of_transformers(name, count, solver):
    model, batch = model_of(name)
    expected = outputs(model, batch)
    layer = QuantizationConfig(weight=int4())
    config = Config(
        layer_type_quant_config={nn.Conv1d: layer, nn.Conv2d: layer},
        algo_config=[ROUNDING[solver]()],
    )
    errors = []
    for chosen in (replace(config, algo_config=None), config):
        model, batch = model_of(name)
        ModelQuantizer(chosen).quantize_model(model, [batch])
        errors.append(float((outputs(model, batch) - expected).norm()))
    layers = [layer for _, layer in quantized_layers(model)]
    assert len(layers) == count and all(layer.frozen for layer in layers)
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.nightly
@pytest.mark.parametrize("solver", ROUNDING)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", NETS)
def test_every_network_every_way(name, spec, solver):
    data, reference = images(), network(name)
    weights = {n: p for n, p in reference.named_parameters() if p.dim() > 1}
    size = spec.group_size or 1
    names = [n.removesuffix(".weight") for n, p in weights.items() if p[0].numel() % size]
    rest = {"exclude": names}
    nearest = ModelQuantizer(configured(spec, **rest)).quantize_model(network(name))
    model = frozen(network(name), spec, ROUNDING[solver](), data, **rest)
    assert output_error(model, reference, data) < 1.1 * output_error(nearest, reference, data)


@pytest.mark.parametrize("solver", ROUNDING)
def test_batches_do_not_change_a_bit(solver):
    data = images(6)
    weights = []
    for cut in (6, 2):
        options = AutoRoundConfig(iters=2) if solver == "autoround" else ROUNDING[solver]()
        model = network("U-Net")
        config = configured(int4(), options)
        ModelQuantizer(config).quantize_model(model, list(data.split(cut)))
        weights.append([p.detach().clone() for p in model.parameters()])
    for other in weights[1:]:
        assert all(map(torch.equal, weights[0], other))


def test_later_units_see_the_outputs_of_rounded_ones(monkeypatch):
    """The second layer is rounded on inputs that the rounded first layer makes."""
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
    model, x = nn.Sequential(first, nn.ReLU(), second), images(6)
    matrix = second.weight.detach().flatten(1).clone()
    frozen(model, int4(), GPTQConfig(desc_act=False), x)
    with torch.no_grad():
        windows = F.unfold(F.relu(first(x)), 3).transpose(1, 2).flatten(0, 1)
    expected = linear_twin(matrix, windows, int4(), GPTQConfig(desc_act=False))
    torch.testing.assert_close(second.weight.flatten(1), expected, rtol=1e-5, atol=1e-6)


def test_quantized_inputs_are_seen_as_they_are_multiplied():
    inputs = replace(scheme("int8").input_tensors, is_dynamic=True, observer_cls=None)
    x = torch.randn(6, 4, 8, 8) * torch.tensor([8.0, 1, 0.1, 0.01]).view(1, 4, 1, 1)
    layer = nn.Conv2d(4, 4, 3, bias=False)
    matrix = layer.weight.detach().flatten(1).clone()
    both = QuantizationConfig(weight=int4(), input_tensors=inputs)
    model = nn.Sequential(layer)
    ModelQuantizer(Config(both, algo_config=[GPTQConfig()])).quantize_model(model, [x])
    rounded = layer.quantized_input(x)
    assert not torch.equal(rounded, x)
    windows = F.unfold(rounded, 3).transpose(1, 2).flatten(0, 1)
    expected = linear_twin(matrix, windows, int4(), GPTQConfig())
    torch.testing.assert_close(layer.weight.flatten(1), expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    def run(model, journal=None):
        config = configured(int4(), GPTQConfig())
        ModelQuantizer(config, journal=journal).quantize_model(model, [images()])
        return [p.detach().clone() for p in model.parameters()]

    expected, done, kept = run(network("U-Net")), [], weight_rounding.round_layers

    def stopping(layers, *args):
        done.append(layers)
        if len(done) == 3:
            raise KeyboardInterrupt
        kept(layers, *args)

    monkeypatch.setattr(weight_rounding, "round_layers", stopping)
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "journal") as journal:
        run(network("U-Net"), journal)
    with Journal(tmp_path / "journal") as journal:
        assert all(map(torch.equal, run(network("U-Net"), journal), expected))
    assert [name for layers in done for name in layers] == [
        *("down1.0", "down2.0", "up"),
        *("up", "out"),
    ]


# ---- rescaling ----------------------------------------------------------------------------------

RESCALING = {
    "smooth": SmoothQuantConfig(alpha=0.5),
    "autosmoothquant": AutoSmoothQuantConfig(),
    "awq": AWQConfig(),
}


def outliers():
    """A network whose norms make some channels large, which the next layer reads."""
    model = network("ResNet")
    for block in (*model.stage1, *model.stage2):
        block.body[1].weight.data[::4] *= 30
        block.body[1].bias.data[::4] *= 30
        block.convolution.weight.data[:, ::4] /= 30
    return model


def rescaled(algorithm, weight, dtype="int8"):
    inputs = QuantizationSpec(dtype, qscheme="per_tensor", symmetric=True, is_dynamic=True)
    config = QuantizationConfig(weight=weight, input_tensors=inputs)
    model, data = outliers(), images()
    algorithms = [algorithm] if algorithm else None
    return ModelQuantizer(Config(config, algo_config=algorithms)).quantize_model(model, [data])


@pytest.mark.parametrize("name", RESCALING)
def test_rescaling_keeps_the_function_and_loses_less(name):
    reference, data = outliers(), images(seed=2)
    fine = rescaled(RESCALING[name], replace(int4(), dtype=Dtype.int16), "int16")
    before = [p.clone() for p in reference.parameters()]
    assert not all(map(torch.equal, fine.parameters(), before))
    assert output_error(fine, reference, data) < 1e-5
    errors = [
        output_error(rescaled(algorithm, int4()), reference, data)
        for algorithm in (None, RESCALING[name])
    ]
    assert errors[1] < 0.75 * errors[0]


def test_layers_of_different_blocks_are_not_searched_together():
    config = scheme("int8")
    quantizer = ModelQuantizer(Config(config, algo_config=[AutoSmoothQuantConfig()]))
    with pytest.raises(ValueError, match=r"down1\.1 and down2\.0, lie in different blocks"):
        quantizer.quantize_model(network("U-Net"), [images()])
