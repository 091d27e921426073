"""Rounding for the sake of predictions, against what its mathematics says."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

from quark.torch import ModelQuantizer
from quark.torch.algorithm import kronecker_solver
from quark.torch.algorithm.gptq_solver import (
    Inputs,
    descend_columns,
    descent_factor,
    inverse_factor,
    solve_columns,
)
from quark.torch.algorithm.kronecker_solver import round_rows_and_columns
from quark.torch.algorithm.yaqa import collect_gradients, fisher_loss, work
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.shapes import BlockShape, DataShape, LayerShape
from quark.torch.quantization.config.algo import AWQConfig, YaqaConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config
from tests.unit.algorithm.contexts import context_of
from tests.unit.algorithm.test_gptq_solver import DAMPING, INPUTS, OUTPUTS, correlated, problem

IDS = torch.randint(3, 64, (6, 16), generator=torch.Generator().manual_seed(4))
STRONG = 0.1


def quarters(x, column):
    return (x * 4).round() / 4


class Rounding:
    """Rounds columns by a function; some rows by that of ``select_rows``. Scales are final."""

    def __init__(self, function=quarters, select_rows=lambda rows: quarters):
        self.function, self._select_rows = function, select_rows

    def __call__(self, x, column):
        return self.function(x, column)

    def select_rows(self, rows):
        return Rounding(self._select_rows(rows))

    def round_rows(self, rows, target, hessian, attempt, multiples=(1.0,)):
        return attempt(target, self.select_rows(rows))


QUARTERS = Rounding()


def inputs():
    """What the solver knows of the inputs of the problem."""
    _, hessian, damped = problem()
    return Inputs(damped, inverse_factor(hessian, DAMPING), torch.arange(INPUTS))


def gradients():
    """Sum of g gᵀ, and the same with damping."""
    g = correlated(tokens=400, inputs=OUTPUTS).double()
    total = g.T @ g
    mean = total.diagonal().mean()
    return total, total + STRONG * mean * torch.eye(OUTPUTS, dtype=total.dtype)


def both(outputs, rounding=QUARTERS):
    return round_rows_and_columns(problem()[0], inputs(), rounding, outputs, STRONG)


def weighted(error, outputs, inputs):
    return float(torch.trace(outputs @ error @ inputs @ error.T))


@pytest.mark.parametrize("pieces", [3, 5, OUTPUTS])
def test_predictions_lose_less_than_by_gptq(monkeypatch, pieces):
    monkeypatch.setattr(kronecker_solver, "ROW_CHUNKS", pieces)
    weight, _, damped = problem()
    outputs, strong = gradients()
    plain = solve_columns(weight, inputs(), QUARTERS)
    before = weighted(plain - weight, strong, damped)
    assert weighted(both(outputs) - weight, strong, damped) < 0.9 * before


def test_rows_make_up_for_those_before_as_well_as_they_can(monkeypatch):
    """Given the first piece of rows, the others aim at what is best for them all."""
    monkeypatch.setattr(kronecker_solver, "ROW_CHUNKS", 2)
    monkeypatch.setattr(kronecker_solver, "SWEEPS", 0)
    weight, _, _ = problem()
    outputs, strong = gradients()
    order = torch.argsort(outputs.diagonal(), descending=True)
    first, rest = order[: OUTPUTS // 2], order[OUTPUTS // 2 :]
    aims = {}

    def exact(x, column):  # rounding that loses nothing shows where the aim was
        aims[column] = x.clone()
        return x

    rounding = Rounding(select_rows=lambda rows: exact if torch.equal(rows, rest) else quarters)
    found = both(outputs, rounding)
    lost = (found - weight)[first]
    best = weight[rest] - torch.linalg.solve(strong[rest][:, rest], strong[rest][:, first] @ lost)
    torch.testing.assert_close(torch.stack(list(aims.values()), 1), best)


def test_outputs_that_matter_alike_are_rounded_alone():
    weight, _, _ = problem()
    given = inputs()
    expected = solve_columns(weight, given, QUARTERS)
    for _ in range(1 + kronecker_solver.SWEEPS):
        expected = descend_columns(expected, weight, given, descent_factor(given), QUARTERS)
    assert torch.equal(both(3 * torch.eye(OUTPUTS, dtype=weight.dtype)), expected)


@pytest.mark.parametrize("pieces", [3, OUTPUTS])
def test_each_sweep_loses_less(monkeypatch, pieces):
    monkeypatch.setattr(kronecker_solver, "ROW_CHUNKS", pieces)
    outputs, strong = gradients()
    losses = []
    for sweeps in range(4):
        monkeypatch.setattr(kronecker_solver, "SWEEPS", sweeps)
        losses.append(weighted(both(outputs) - problem()[0], strong, problem()[2]))
    assert losses[1] < 0.99 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_a_sweep_aims_at_what_is_best_beside_all_other_rows(monkeypatch):
    monkeypatch.setattr(kronecker_solver, "ROW_CHUNKS", 2)
    monkeypatch.setattr(kronecker_solver, "SWEEPS", 0)
    weight, _, _ = problem()
    outputs, strong = gradients()
    before = both(outputs)
    first, rest = torch.argsort(outputs.diagonal(), descending=True).tensor_split(2)
    targets = []

    class Watching(Rounding):
        def round_rows(self, rows, target, hessian, attempt, multiples=(1.0,)):
            targets.append(target.clone())
            return super().round_rows(rows, target, hessian, attempt)

    monkeypatch.setattr(kronecker_solver, "SWEEPS", 1)
    found = both(outputs, Watching())
    for rows, others, now, target in (
        (first, rest, before, targets[2]),
        (rest, first, found, targets[3]),
    ):
        lost = (now - weight)[others]
        shift = torch.linalg.solve(strong[rows][:, rows], strong[rows][:, others] @ lost)
        torch.testing.assert_close(target, weight[rows] - shift)


def test_gradients_that_tell_nothing():
    outputs = torch.full((OUTPUTS, OUTPUTS), torch.nan, dtype=torch.float64)
    assert torch.equal(both(outputs), solve_columns(problem()[0], inputs(), QUARTERS))


def test_later_rows_make_up_for_what_is_left_under_fitted_scales(monkeypatch):
    """A chunk whose scales fit its target exactly leaves nothing to the rows behind it."""
    monkeypatch.setattr(kronecker_solver, "ROW_CHUNKS", 2)
    monkeypatch.setattr(kronecker_solver, "SWEEPS", 0)
    weight, targets = problem()[0], []

    class Fitting(Rounding):
        def round_rows(self, rows, target, hessian, attempt, multiples=(1.0,)):
            assert multiples == kronecker_solver.MULTIPLES
            targets.append(target.clone())
            return target

    outputs, _ = gradients()
    found = both(outputs, Fitting())
    torch.testing.assert_close(found, weight)
    order = torch.argsort(outputs.diagonal(), descending=True)
    assert len(targets) == 2
    torch.testing.assert_close(torch.cat(targets), weight[order])


# ---- gradients ----------------------------------------------------------------------------------


def observed(name, batches, options=None):
    context = context_of(build(small_config(name)), "int4_wo_32", batches=batches)
    with ActivationStore() as store:
        found = collect_gradients(context, options or YaqaConfig(), store)
        sums = {name: found.output_hessian(name) for name in context.layers}
        kept = {name: total.clone() for name, total in sums.items() if total is not None}
        tokens = {
            (block, i): weights.clone()
            for block in context.structure.blocks
            for i in range(len(batches))
            if (weights := found.token_norms(block, i)) is not None
        }
        return context.model, kept, tokens


def close(found, expected):
    least = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=least)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_those_of_the_loss_of_the_whole_model(name):
    model, found, _ = observed(name, [{"input_ids": IDS}])
    expected = {}

    def watch(layer, name):
        def hook(module, args, y):
            y.register_hook(lambda g: expected.__setitem__(name, g.flatten(0, 1)))

        layer.register_forward_hook(hook)

    for layer in found:
        watch(model.get_submodule(layer), layer)
    fisher_loss(model(IDS, use_cache=False).logits, None).backward()
    assert len(found) == len(expected) > 4
    for layer, g in expected.items():
        close(found[layer], (g.T @ g).float())


def test_the_split_into_batches_is_of_no_consequence():
    _, whole, tokens = observed("llama", [{"input_ids": IDS}])
    _, split, parts = observed("llama", [{"input_ids": IDS[:1]}, {"input_ids": IDS[1:]}])
    for layer, total in whole.items():
        close(split[layer], total)
    for (block, _), weights in tokens.items():
        assert weights.shape == (IDS.numel(),)
        close(torch.cat([parts[block, 0], parts[block, 1]]), weights)


def test_padding_does_not_count():
    _, plain, tokens = observed("llama", [{"input_ids": IDS[:2]}])
    padded = F.pad(IDS[:2], (0, 5))
    mask = F.pad(torch.ones_like(IDS[:2]), (0, 5))
    _, found, kept = observed("llama", [{"input_ids": padded, "attention_mask": mask}])
    for layer, total in plain.items():
        close(found[layer], total)
    for place, weights in tokens.items():
        close(kept[place], weights)


def test_experts_have_none():
    _, found, _ = observed("mixtral", [{"input_ids": IDS}])
    assert found and not any(".experts." in name for name in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_has_the_memory_of_the_loss(dtype):
    tokens, labels = 128, 4096
    inputs = torch.randn(1, tokens, labels).to(dtype).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logits = inputs * 1
        fisher_loss(logits, None).backward()
    events = profiler.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    peak = max(accumulate(sizes))
    data = DataShape(tokens, tokens, tokens, 8, logits.itemsize, labels, 1)
    planned = work(YaqaConfig(), BlockShape(0, 0.0, (LayerShape(8, 8, "x"),)), data).memory
    assert peak == pytest.approx(planned, rel=0.1)


def test_gradients_have_the_covariance_of_labels_drawn_from_the_predictions():
    """That of the gradient p - e of a label e drawn from p is diag(p) - p pᵀ."""
    chances = torch.tensor([0.7, 0.04, 0.25, 0.01])
    logits = (chances.log() + 3).expand(2, 50_000, 4).clone().requires_grad_()
    fisher_loss(logits, None).backward()
    g = logits.grad.flatten(0, 1).double()
    p = chances.double()
    torch.testing.assert_close(g.mean(0), torch.zeros_like(p), rtol=0, atol=5e-3)
    torch.testing.assert_close(g.T @ g / len(g), p.diag() - p.outer(p), rtol=0, atol=2e-3)
    torch.testing.assert_close(g.sum(1), torch.zeros(len(g)).double(), rtol=0, atol=1e-6)
    assert not torch.equal(*logits.grad)  # each sequence has its own random numbers


def test_a_sure_prediction_has_a_small_gradient_each_time():
    """Of a label drawn from it, most are tiny and a few are large."""
    logits = torch.tensor([8.0, 0, 0, 0]).expand(1, 10_000, 4).clone().requires_grad_()
    fisher_loss(logits, None).backward()
    norms = logits.grad[0].norm(dim=-1)
    assert norms.max() < 3 * norms.mean()


@pytest.mark.parametrize("option", ["damp_percent", "output_damp_percent"])
def test_shares_that_are_none(option):
    with pytest.raises(ValueError, match=rf"YaqaConfig\.{option} must be between 0 and 1, got 1.5"):
        YaqaConfig(**{option: 1.5})


def test_a_model_without_logits_is_refused_before_any_algorithm(unchanged, monkeypatch):
    """AWQ before it would take most of the time."""
    model = build(small_config("llama")).model  # without a head
    config = Config(scheme("int4_wo_32"), algo_config=[AWQConfig(), YaqaConfig()])
    monkeypatch.setattr("quark.torch.algorithm.awq.run_blocks", None)  # not called
    with unchanged(model), pytest.raises(ValueError, match="returns logits, got BaseModelOutput"):
        ModelQuantizer(config).quantize_model(model, [IDS])


def test_layers_that_no_logits_depend_on_are_rounded_by_gptq(caplog):
    """The boxes of DETR, whose logits are the classes."""
    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", out_features=["stage1"]
    )
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "num_queries": 3, "num_labels": 4}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    detr = {"use_timm_backbone": False, "use_pretrained_backbone": False, "d_model": 16, **sizes}
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **detr)).eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    config = Config(scheme("int8_wo"), algo_config=[YaqaConfig()])
    ModelQuantizer(config).quantize_model(model, [{"pixel_values": torch.randn(2, 3, 32, 32)}])
    said = caplog.text
    for number in (0, 1):
        assert f"no logits depend on bbox_predictor.layers.{number} by finite" in said
    assert "fc1 by finite" not in said
    for name in ("bbox_predictor.layers.1.weight", "model.encoder.layers.0.mlp.fc1.weight"):
        assert not torch.equal(before[name], model.get_parameter(name))
