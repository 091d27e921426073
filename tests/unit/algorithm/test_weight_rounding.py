"""One layer rounded with compensation, and the statistics that experts pool."""

import logging

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm import weight_rounding
from quark.torch.algorithm.gptq_solver import inverse_factor, round_columns, solve_columns
from quark.torch.algorithm.weight_rounding import (
    pool_expert_statistics,
    round_by_input,
    round_layer,
)
from quark.torch.pipeline.accumulators import Gram
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import (
    Config,
    Int8PerTensorSpec,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.preparation import replace_layers, select_layers
from tests.configurations import quantized_by
from tests.unit.algorithm.test_gptq_solver import (
    DAMPING,
    INPUTS,
    OUTPUTS,
    TOKENS,
    correlated,
    generator,
)

EACH_ONCE = {  # each format of weights
    str(spec): name for name in scheme_names() if (spec := scheme(name, 32).weight).fmt.scaled
}
WEIGHTS = {
    **{name: scheme(name, 32).weight for name in EACH_ONCE.values()},
    "int4 per tensor": QuantizationSpec(
        dtype="int4", qscheme="per_tensor", is_dynamic=False, symmetric=True
    ),
    "int8 per tensor": Int8PerTensorSpec().to_quantization_spec(),
    "fp8 blocks": QuantizationSpec(
        dtype="fp8_e4m3", qscheme="per_block", block_size=(8, 32), is_dynamic=False
    ),
    "groups of rows": QuantizationSpec(
        dtype="int4", qscheme="per_group", ch_axis=0, group_size=8, is_dynamic=False
    ),
}
FEW_BITS = {name: spec for name, spec in WEIGHTS.items() if spec.coded.fmt.bits <= 4}


def gram_of(x):
    gram = Gram()
    gram(x)
    return gram


def layer_of(spec, kind=nn.Linear, bias=None, inputs=INPUTS):
    """A quantized layer with the same weight each time."""
    linear = nn.Linear(inputs, OUTPUTS) if kind is nn.Linear else Conv1D(OUTPUTS, inputs)
    values = torch.randn(OUTPUTS, inputs, generator=generator())
    with torch.no_grad():
        linear.weight.copy_(values if kind is nn.Linear else values.T)
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(QuantizationConfig(weight=spec, bias=bias))))
    settle(model[0])
    return model[0]


def settle(layer):
    layer.weight_quantizer.observer(layer.weight)
    layer.weight_quantizer.compute_scales(layer.weight)
    layer.weight_quantizer.observer.reset()


def rows_of(layer):
    return (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).detach().clone()


def rounded(layer, gram, damping=DAMPING, by_magnitude=True, solver=solve_columns):
    """Return the rows of a layer after GPTQ."""
    round_layer("layer", layer, gram, damping, by_magnitude, solver)
    return rows_of(layer)


# ---- one layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.sampled(3)
def test_errors_add_up_to_the_damped_error_of_outputs(name, kind):
    kept = []

    def watched(weight, inputs, rounding):
        kept.append(round_columns(weight, inputs.factor, inputs.order, rounding))
        return kept[-1][0]

    layer, x = layer_of(WEIGHTS[name], kind), correlated()
    before = rows_of(layer).double()
    rounded(layer, gram_of(x), solver=watched)
    [(after, errors)] = kept
    hessian = x.double().T @ x.double() / len(x)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(INPUTS)
    lost = before - after.double()
    expected = ((lost @ damped) * lost).sum(1)
    torch.testing.assert_close(errors.double().square().sum(1), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_inputs_without_correlation_ask_for_rounding_to_nearest(name, kind, monkeypatch):
    monkeypatch.setattr(weight_rounding, "weight_with_best_ranges", lambda *_: None)
    layer = layer_of(WEIGHTS[name], kind)
    expected = layer.quantized_tensor("weight").codes
    gram = gram_of(torch.diag(torch.linspace(0.5, 2, INPUTS)))
    rounded(layer, gram)
    assert torch.equal(layer.quantized_tensor("weight").codes, expected)


def loss(change, x):
    return float((x.double() @ change.double().T).square().sum())


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("by_magnitude", [True, False])
@pytest.mark.sampled(3)
def test_outputs_lose_less_than_by_rounding(name, kind, by_magnitude):
    layer, x = layer_of(WEIGHTS[name], kind), correlated()
    before = rows_of(layer)
    nearest = layer.weight_quantizer.fake_quantize_copy(layer.weight.detach())
    nearest = nearest if kind is nn.Linear else nearest.T
    after = rounded(layer, gram_of(x), by_magnitude=by_magnitude)
    bound = 0.5 if by_magnitude else 0.75
    if layer.weight_quantizer.scheme.scale.span:  # scales are fitted before they are rounded to
        bound += 0.05
    assert loss(after - before, x) < bound * loss(nearest - before, x)


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_those_of_codes(name):
    layer = layer_of(WEIGHTS[name])
    after = rounded(layer, gram_of(correlated()))
    assert layer.frozen
    assert torch.equal(layer.quantized_tensor("weight").value(torch.float32), after)


def test_inputs_that_are_always_zero_are_rounded_to_nearest(monkeypatch):
    monkeypatch.setattr(weight_rounding, "weight_with_best_ranges", lambda *_: None)
    layer, x = layer_of(scheme("int4_wo_32").weight), correlated()
    dead = torch.tensor([0, 17, 127])
    x[:, dead] = 0
    nearest = layer.quantized_tensor("weight").codes
    rounded(layer, gram_of(x))
    codes = layer.quantized_tensor("weight").codes
    assert torch.equal(codes[:, dead], nearest[:, dead])
    assert not torch.equal(codes, nearest)


def test_no_input_is_ever_used(monkeypatch):
    monkeypatch.setattr(weight_rounding, "weight_with_best_ranges", lambda *_: None)
    layer = layer_of(scheme("int4_wo_32").weight)
    nearest = layer.quantized_tensor("weight").codes
    rounded(layer, gram_of(torch.zeros(8, INPUTS)))
    assert torch.equal(layer.quantized_tensor("weight").codes, nearest)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("damping", [0.0, 1e-9, 0.01])
@pytest.mark.parametrize(
    "x",
    [
        correlated(tokens=3),
        torch.ones(9, INPUTS),
        correlated() * torch.logspace(-12, 0, INPUTS),
        torch.eye(INPUTS)[:1] * 1e6 + 1e-6,
    ],
    ids=["few tokens", "one token", "far apart", "an outlier"],
)
def test_hessians_that_can_hardly_be_inverted(x, damping, scale):
    layer = layer_of(scheme("int4_wo_32").weight)
    before = rows_of(layer)
    nearest = layer.weight_quantizer.fake_quantize_copy(layer.weight.detach())
    rounded(layer, gram_of(x * scale), damping)
    after = layer.weight_quantizer.freeze_(layer.weight.detach().clone())
    assert bool(after.isfinite().all())
    assert loss(after - before, x) <= loss(nearest - before, x) * (1 + 1e-4)


def test_a_hessian_that_is_damaged_is_reported(caplog):
    layer = layer_of(scheme("int4_wo_32").weight)
    gram = gram_of(correlated())
    gram.total = -gram.total
    before = rows_of(layer)
    with caplog.at_level(logging.WARNING):
        after = rounded(layer, gram)
    assert "layer: its Hessian cannot be inverted" in caplog.text
    assert torch.equal(after, before) and not layer.frozen


def test_damping_that_grows_is_reported(caplog):
    x = torch.ones(3, INPUTS) * 1e3
    with caplog.at_level(logging.WARNING):
        upper = inverse_factor(x.T @ x - 10 * torch.eye(INPUTS), 0.0)
    assert "ill-conditioned: damped by" in caplog.text and bool(upper.isfinite().all())


def test_a_layer_without_data_is_left_to_rounding(caplog):
    layer = layer_of(scheme("int4_wo_32").weight)
    before = rows_of(layer)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(rounded(layer, Gram()), before)
    assert "No data reached layer" in caplog.text and not layer.frozen


def test_biases_are_rounded_too():
    spec = Int8PerTensorSpec().to_quantization_spec()
    layer = layer_of(scheme("int4_wo_32").weight, bias=spec)
    expected = layer.bias_quantizer.fake_quantize_copy(layer.bias.detach())
    assert not torch.equal(expected, layer.bias)
    rounded(layer, gram_of(correlated()))
    assert torch.equal(layer.bias, expected)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_the_mean_of_rounded_inputs_leaves_the_bias(kind):
    spec, noise = scheme("int4_wo_32").weight, torch.linspace(-1, 2, INPUTS)
    layer, gram = layer_of(spec, kind), gram_of(correlated())
    before, gram.noise = layer.bias.detach().clone(), TOKENS * noise
    round_by_input({"layer": layer}, {"layer": gram}, DAMPING, True)
    assert torch.equal(rows_of(layer), rounded(layer_of(spec, kind), gram_of(correlated())))
    torch.testing.assert_close(layer.bias.detach(), before - rows_of(layer) @ noise)
    assert (layer.bias - before).abs().max() > 1


def test_cutting_data_changes_nothing():
    x = correlated().double().mul(8).round().div(8).float()  # sums that are exact in any order
    cut = Gram()
    for part in x.split([1, 200, 0, 311]):
        cut(part)
    first, second = (layer_of(scheme("int4_wo_32").weight) for _ in range(2))
    assert torch.equal(rounded(first, gram_of(x)), rounded(second, cut))


# ---- experts ------------------------------------------------------------------------------------


def test_experts_lean_on_those_beside_them():
    many, few, none = gram_of(correlated(4096)), gram_of(correlated(4)), Gram()
    alone = {"many": many.total / 4096, "few": few.total / 4}
    pool = (many.total + few.total) / 4100
    pool_expert_statistics([["many", "few", "none"]], {"many": many, "few": few, "none": none})

    def close(gram, expected, share):
        return float((gram.total / gram.tokens - expected).norm() / expected.norm()) < share

    assert close(many, alone["many"], 0.01) and not close(many, alone["few"], 0.1)
    assert close(few, pool, 0.4) and not close(few, pool, 0.01)
    torch.testing.assert_close(none.total / none.tokens, pool)


def test_an_expert_that_saw_nothing_is_solved_for_by_the_others():
    gram = Gram()
    pool_expert_statistics([["a", "b"]], {"a": gram_of(correlated()), "b": gram})
    layer = layer_of(scheme("int4_wo_32").weight)
    before, x = rows_of(layer), correlated()
    nearest = layer.weight_quantizer.fake_quantize_copy(layer.weight.detach())
    assert loss(rounded(layer, gram) - before, x) < 0.6 * loss(nearest - before, x)


def test_experts_share_the_mean_of_rounded_inputs():
    many, few, none = gram_of(correlated(4096)), gram_of(correlated(4)), Gram()
    many.noise, few.noise = torch.full((INPUTS,), 4096.0), torch.full((INPUTS,), -8.0)
    pool_expert_statistics([["many", "few", "none"]], {"many": many, "few": few, "none": none})
    pool = (4096 - 8) / 4100
    tokens = INPUTS / 4
    torch.testing.assert_close(none.mean_noise(), torch.full((INPUTS,), pool))
    expected = (-8 + tokens * pool) / (4 + tokens)
    torch.testing.assert_close(few.mean_noise(), torch.full((INPUTS,), expected))


def test_statistics_that_experts_share_are_mixed_once():
    shared, other = gram_of(correlated()), gram_of(correlated(64))
    grams = {"0.gate": shared, "0.up": shared, "1.gate": other, "1.up": other}
    pool_expert_statistics([["0.gate", "1.gate"], ["0.up", "1.up"]], grams)
    assert shared.tokens == TOKENS + INPUTS / 4 and other.tokens == 64 + INPUTS / 4


def test_no_expert_saw_anything():
    gram = Gram()
    pool_expert_statistics([["a"]], {"a": gram})
    assert gram.total is None


def test_sums_are_forgotten_for_the_memory_that_they_take():
    x, spec = correlated(), WEIGHTS["int4 per tensor"]
    layers = {name: layer_of(spec) for name in ("first", "second")}
    gram = gram_of(x)
    sums = gram.total
    expected = rounded(layer_of(spec), gram_of(x))
    round_by_input(layers, dict.fromkeys(layers, gram), DAMPING, True)
    assert gram.total is None
    torch.testing.assert_close(  # the solver has damped the mean, in the memory of the sums
        sums.fill_diagonal_(0), (gram_of(x).total / TOKENS).fill_diagonal_(0), rtol=0, atol=0
    )
    assert all(rows_of(layer).equal(expected) for layer in layers.values())


def test_blocks_without_layers():
    """The advice names nothing that is empty already."""

    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms, self.head = nn.ModuleList([nn.LayerNorm(32)]), nn.Linear(32, 32)

        def forward(self, x):
            return self.head(self.norms[0](x))

    said = r"gptq: no linear layer .* in the 1 decoder blocks .* Leave gptq out: other layers"
    with pytest.raises(ValueError, match=said):
        quantized_by(Norms(), "int4_wo_32", GPTQConfig(), data=[torch.randn(2, 4, 32)])
