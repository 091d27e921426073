"""Training of whole models: start without data, evaluation, and the freeze that ends it."""

import copy

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
    TQTSpec,
)

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(5)), torch.ones(64, 4)
LEARNED = {"LSQ": QATSpec(), "TQT": TQTSpec()}
KINDS = {**LEARNED, "following": None}


def config_of(qat_spec, **options):
    tensor = QuantizationSpec("int8", qscheme="per_tensor", symmetric=True, qat_spec=qat_spec)
    rows = QuantizationSpec(
        "int4", qscheme="per_channel", ch_axis=0, symmetric=True, qat_spec=qat_spec
    )
    layer = QuantizationConfig(weight=rows, input_tensors=tensor, output_tensors=tensor)
    return Config(layer, **options)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


def quantized(kind, data=None, **options):
    data = [X] if data is None and kind == "following" else data
    return ModelQuantizer(config_of(KINDS[kind], **options)).quantize_model(net(), data)


def train(model, steps=30, lr=0.01):
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_freeze(kind):
    """The frozen model computes what the trained one computes in evaluation mode."""
    model = quantized(kind).train()
    losses = train(model)
    assert losses[-1] < 0.6 * losses[0]
    model.eval()
    expected = model(X).detach()
    before = model[0].weight.detach().clone()
    assert ModelQuantizer.freeze(model) is model
    assert torch.equal(model(X), expected)
    assert not torch.equal(model[0].weight, before)
    assert (model(X) - Y).square().mean() < 0.6 * losses[0]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names == ["0.bias", "2.bias"]  # nothing that is quantized trains any more
    assert not any(".range_" in name for name in model.state_dict())
    model.train()(100 * X)
    assert torch.equal(model.eval()(X), expected)


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("data", [None, []])
def test_no_data_is_needed_for_trained_ranges(kind, data):
    model = quantized(kind, data)
    assert model[0].weight_quantizer.scale is not None  # from the weight
    assert model[0].input_quantizer.scale is None
    with pytest.raises(RuntimeError, match=r"call model\.train"):
        model(X)
    with pytest.raises(ValueError, match=r"trained ranges of 0\.input_tensors, .* have no value"):
        ModelQuantizer.freeze(model)
    model.train()(X)
    assert model[0].input_quantizer.scale > 0


@pytest.mark.parametrize("kind", LEARNED)
def test_data_starts_trained_ranges(kind):
    model = quantized(kind, [X, 2 * X])
    observer = model[0].input_quantizer.spec.make_observer()
    observer(torch.cat([X, 2 * X]))
    torch.testing.assert_close(
        model[0].input_quantizer.scale, observer.calculate_qparams()[0], rtol=1e-6, atol=0
    )
    model(X)
    ModelQuantizer.freeze(model)


def test_other_static_ranges_still_need_data():
    mixed = config_of(QATSpec())
    mixed.layer_quant_config = {"2": config_of(None).global_quant_config}
    for data in (None, []):
        with pytest.raises(ValueError, match=r"[Ss]tatic activation ranges need"):
            ModelQuantizer(mixed).quantize_model(net(), data)


@pytest.mark.parametrize("kind", KINDS)
def test_freeze_in_training_mode(kind):
    model = quantized(kind).train()
    train(model, 2)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"training mode.* ModelQuantizer.freeze\(model.eval\(\)\)"
    ):
        ModelQuantizer.freeze(model)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not model[0].frozen


def test_a_model_that_never_trained_freezes_in_any_mode():
    model = quantized("following")
    assert model.training
    ModelQuantizer.freeze(model)


def test_layers_share_scales_after_training():
    tensor = QuantizationSpec("fp8_e4m3", qscheme="per_tensor")
    config = Config(QuantizationConfig(weight=tensor), shared_scale_groups=[["0", "2"]])
    model = ModelQuantizer(config).quantize_model(net()).train()
    train(model, 5, lr=0.1)
    assert model[0].weight_quantizer.scale != model[2].weight_quantizer.scale
    largest = max(float(m.weight.detach().abs().max()) for m in (model[0], model[2]))
    ModelQuantizer.freeze(model.eval())
    scales = [float(m.weight_quantizer.scale) for m in (model[0], model[2])]
    assert scales == [pytest.approx(largest / 448, rel=1e-6)] * 2


def test_weights_that_overflow_are_named():
    model = quantized("following").train()
    train(model, 1)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"2\.weight has NaN or infinite values"):
        ModelQuantizer.freeze(model.eval())


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_restores_the_float_model(kind, unchanged):
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
    with unchanged(model), pytest.raises(ValueError, match="infinite"):
        ModelQuantizer(config_of(KINDS[kind])).quantize_model(model, [X])
    assert len(list(model.parameters())) == 4
