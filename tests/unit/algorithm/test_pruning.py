"""Pruning: which weights become zero, what it costs, and that every later step keeps the zeros."""

from functools import cache, partial
from itertools import combinations

import pytest
import torch

from quark.torch import ModelImporter
from quark.torch.algorithm.gptq_solver import inverse_factor, round_columns
from quark.torch.algorithm.layers import output_error
from quark.torch.algorithm.pruning import prune_by_hessian, prune_by_norm, select_smallest
from quark.torch.numerics.column_rounder import ZeroKeepingRounder
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SparseGPTConfig,
    SVDQuantConfig,
    WandaConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.config import QuantizationSpec
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.type import ZeroPointType
from quark.torch.quantization.preparation import quantized_layers
from tests.configurations import quantized_by
from tests.models.architectures import varied

PRUNING = {"sparsegpt": SparseGPTConfig, "wanda": WandaConfig}
DATA = torch.randint(3, 64, (8, 24), generator=torch.Generator().manual_seed(6))
quantized = partial(quantized_by, data=[DATA])


def problem(rows=5, columns=8, tokens=64):
    """A weight and inputs whose channels are correlated and of several sizes."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(columns, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    x *= torch.rand(columns, generator=generator) * 4 + 0.1
    return torch.randn(rows, columns, generator=generator), x


def quantized_layer(weight):
    """A linear layer with this weight and the scales of int4 in groups of 32."""
    layer = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    layer.weight.data.copy_(weight)
    model = torch.nn.Sequential(layer)
    [(_, layer)] = quantized_layers(quantized_by(model, "int4_wo_32", exclude=[]))
    return layer


def weights_of(model):
    return {name: layer.weight.detach().clone() for name, layer in quantized_layers(model)}


def sparsities(model):
    """Fraction of zeros in the weight of each layer."""
    return {name: float((w == 0).float().mean()) for name, w in weights_of(model).items()}


def keeps_two_of_four(weight):
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


# ---- which weights become zero ------------------------------------------------------------------


def test_wanda_keeps_the_two_of_four_with_the_largest_products():
    """Every choice of two is tried; the sum of |w| · |x| of the kept ones is the largest."""
    weight, x = problem()
    norms = x.norm(dim=0)
    result = prune_by_norm(weight, norms, WandaConfig())
    for row, pruned in zip(weight, result, strict=True):
        for start in (0, 4):
            part = row[start : start + 4].abs() * norms[start : start + 4]
            best = max(combinations(range(4), 2), key=lambda pair: float(part[list(pair)].sum()))
            expected = torch.zeros(4)
            expected[list(best)] = row[start : start + 4][list(best)]
            assert torch.equal(pruned[start : start + 4], expected)


def test_wanda_without_a_structure_counts_in_each_row():
    weight, x = problem()
    options = WandaConfig(mask_structure="unstructured", sparsity=0.375)
    zeros = prune_by_norm(weight, x.norm(dim=0), options) == 0
    assert zeros.sum(1).tolist() == [3] * 5
    scores = weight.abs() * x.norm(dim=0)
    assert bool(
        (scores.masked_fill(~zeros, 0).amax(1) < scores.masked_fill(zeros, 9e9).amin(1)).all()
    )


def prune_by_inverses(weight, hessian, select, width):
    """SparseGPT by its definition: after each column, the inverse of what remains of H.

    The optimal update of the remaining weights (optimal brain surgeon) removes a row and a column
    of H, whose inverse is computed anew.
    """
    w, result = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    h = hessian.double()
    columns = w.shape[1]
    zeros = torch.zeros_like(w, dtype=torch.bool)
    for i in range(columns):
        inverse = torch.linalg.inv(h[i:, i:])
        if i % width == 0:
            end = min(i + width, columns)
            own = [torch.linalg.inv(h[j:, j:])[0, 0] for j in range(i, end)]
            zeros[:, i:end] = select(w[:, i:end] ** 2 / torch.stack(own))
        result[:, i] = w[:, i].masked_fill(zeros[:, i], 0.0)
        error = (w[:, i] - result[:, i]) / inverse[0, 0]
        w[:, i:] -= error.unsqueeze(1) * inverse[0]
    return result


@pytest.mark.parametrize("columns", [8, 40])
def test_sparsegpt_is_the_solution_by_inverses(columns):
    weight, x = problem(columns=columns)
    hessian = x.T @ x / len(x)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)

    def two_of_four(scores):
        kept = scores.unflatten(-1, (-1, 4)).topk(2).indices
        return torch.ones(*kept.shape[:2], 4).scatter_(-1, kept, 0).flatten(1).bool()

    result = prune_by_hessian(weight, inverse_factor(hessian, 0.01), SparseGPTConfig())
    expected = prune_by_inverses(weight, damped, two_of_four, 4)
    assert torch.equal(result == 0, expected == 0)
    assert (result - expected).abs().max() < 1e-3 * expected.abs().max()

    def third(scores):
        flat = scores.flatten()
        return (flat <= flat.kthvalue(int(0.3 * len(flat))).values).view_as(scores)

    options = SparseGPTConfig(mask_structure="unstructured", sparsity=0.3, block_size=16)
    result = prune_by_hessian(weight, inverse_factor(hessian, 0.01), options)
    expected = prune_by_inverses(weight, damped, third, 16)
    assert torch.equal(result == 0, expected == 0)
    assert (result - expected).abs().max() < 1e-3 * expected.abs().max()


def test_ties_are_settled_by_the_order():
    scores = torch.tensor([[3.0, 1, 1, 1], [0, 0, 0, 0]])
    expected = [[False, True, True, False], [True, True, False, False]]
    assert select_smallest(scores, 2).tolist() == expected


# ---- models -------------------------------------------------------------------------------------


@cache
def loss_of(name):
    """Change of the logits of the calibration data by pruning, in a format of 8 bits."""
    model = varied("llama", num_hidden_layers=1)
    with torch.no_grad():
        expected = model(DATA).logits
        if name == "magnitude":
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    ones = torch.ones(layer.in_features)
                    layer.weight.copy_(prune_by_norm(layer.weight, ones, WandaConfig()))
        else:
            model = quantized(model, "int8_wo", PRUNING[name]())
        return float((model(DATA).logits - expected).norm())


def test_models_lose_less_than_by_magnitude():
    assert loss_of("sparsegpt") < loss_of("wanda") < loss_of("magnitude")


@pytest.mark.parametrize(
    ("model", "name"), [("gpt2", "wanda"), ("mixtral", "sparsegpt"), ("opt", "sparsegpt")]
)
def test_architectures(model, name):
    layers = weights_of(quantized(varied(model), "int4_wo_32", PRUNING[name](), GPTQConfig()))
    for layer, weight in layers.items():
        assert keeps_two_of_four(weight.T if model == "gpt2" else weight), layer


@pytest.mark.parametrize("name", PRUNING)
def test_fractions_and_layers_that_are_named(name):
    options = PRUNING[name](
        mask_structure="unstructured", sparsity=0.7, inside_layer_modules=["mlp.down_proj"]
    )
    for layer, sparsity in sparsities(quantized(varied("llama"), "fp8", options)).items():
        assert sparsity == pytest.approx(0.7, abs=0.02) if "down_proj" in layer else sparsity < 0.1


ROUNDING = {
    "nearest": [],
    "awq": [AWQConfig()],
    "smooth": [SmoothQuantConfig(alpha=0.5)],
    "autosmoothquant": [AutoSmoothQuantConfig()],
    "gptq": [GPTQConfig()],
    "in turn": [GPTQConfig(true_sequential=True)],
    "gptaq": [GPTAQConfig()],
    "qronos": [QronosConfig()],
    "yaqa": [YaqaConfig()],
    "autoround": [AutoRoundConfig(iters=4, lr=0.05, minmax_lr=0.01)],
    "awq and gptq": [AWQConfig(), GPTQConfig()],
}


SLOW = ("yaqa", "autoround", "gptaq", "awq and gptq")


@pytest.mark.parametrize(
    "rounding",
    [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in ROUNDING],
)
def test_what_follows_keeps_the_zeros(rounding, export):
    scheme = "int8" if "smooth" in rounding else "uint4_wo_32"
    model = quantized(varied("llama"), scheme, WandaConfig(), *ROUNDING[rounding])
    assert all(keeps_two_of_four(weight) for weight in weights_of(model).values())


@pytest.mark.parametrize(
    "scheme", ["mxfp4", "nvfp4", "mxfp6_e2m3", "fp8", "mx6", "bfp16", "uint4_wo_32", "int4_fp8"]
)
def test_formats_have_a_zero(scheme):
    model = quantized(varied("llama", num_hidden_layers=1), scheme, WandaConfig())
    assert all(keeps_two_of_four(weight) for weight in weights_of(model).values())


@pytest.mark.parametrize(
    ("scheme", "mode"), [("uint4_wo_32", "quark"), ("int4_wo_32", "compressed-tensors")]
)
def test_checkpoints_keep_the_zeros(export, scheme, mode):
    model = quantized(varied("llama"), scheme, WandaConfig(), GPTQConfig())
    path = export(model, custom_mode=mode)
    loaded = ModelImporter(path).import_model_info(varied("llama"))
    for name, weight in weights_of(model).items():
        assert keeps_two_of_four(weight)
        stored = loaded.get_submodule(name).quantized_tensor("weight").value(torch.float32)
        assert torch.equal(stored, weight)


def test_columns_behind_a_zero_compensate_for_its_error():
    """Zeros that are kept meanwhile cost less than zeros that are restored afterwards."""
    weight, x = problem(rows=16, columns=32)
    hessian = x.T @ x / len(x)
    factor, order = inverse_factor(hessian, 0.01), torch.arange(32)
    weight = prune_by_hessian(weight, factor, SparseGPTConfig())
    layer = quantized_layer(weight)
    rounding = layer.weight_quantizer.column_rounder(weight.shape, layer.to_matrix)
    kept, _ = round_columns(weight, factor, order, ZeroKeepingRounder(rounding, weight == 0))
    restored = round_columns(weight, factor, order, rounding)[0].masked_fill(weight == 0, 0.0)
    assert torch.equal((kept == 0) | (weight != 0), torch.ones_like(weight, dtype=torch.bool))
    nearest = layer.weight_quantizer.fake_quantize_copy(weight)
    errors = [float(output_error(w - weight, hessian)) for w in (kept, restored, nearest)]
    assert errors[0] < 0.95 * errors[1] and errors[0] < 0.9 * errors[2], errors


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ([WandaConfig(), RotationConfig()], "rotation follows wanda.*Put rotation first"),
        ([SparseGPTConfig(), SVDQuantConfig()], "svdquant follows sparsegpt.*Leave one out"),
        ([SVDQuantConfig(), WandaConfig()], "wanda follows svdquant"),
        ([GPTQConfig(), WandaConfig()], "wanda follows gptq, which rounds weights for good"),
        ([WandaConfig(mask_structure="3:5")], "inputs, which groups of 5 .* do not divide"),
        ([WandaConfig(inside_layer_modules=["no"])], "Leave both empty for all"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(a.name for a in value),
)
def test_what_does_not_fit_is_refused(algorithms, message, unchanged):
    model = varied("llama")
    with unchanged(model), pytest.raises(ValueError, match=message):
        quantized(model, "int4_wo_32", *algorithms)


def test_zero_points_in_float_are_refused(unchanged):
    weight = QuantizationSpec(
        "uint4",
        qscheme="per_group",
        ch_axis=-1,
        group_size=32,
        symmetric=False,
        is_dynamic=False,
        zero_point_type=ZeroPointType.float32,
    )
    model = varied("llama")
    with unchanged(model), pytest.raises(ValueError, match="a zero does not stay zero"):
        quantized(model, QuantizationConfig(weight=weight), WandaConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_structure": "4:2"}, "with 0 < N < M, such as '2:4', got '4:2'"),
        ({"mask_structure": "half"}, "got 'half'"),
        ({"sparsity": 0.3}, "sets 0.5 of the weights to zero, but sparsity=0.3"),
        ({"mask_structure": "unstructured", "sparsity": 1.0}, "above 0 and below 1, got 1.0"),
        ({"damp_percent": 2}, "damp_percent must be between 0 and 1, got 2"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        SparseGPTConfig(**options)


def test_options_of_structures():
    assert SparseGPTConfig().group == (2, 4) and SparseGPTConfig().fraction == 0.5
    assert WandaConfig(mask_structure="1:4", sparsity=0.75).fraction == 0.75
    assert WandaConfig(mask_structure="unstructured").fraction == 0.5


@pytest.mark.parametrize("name", PRUNING)
def test_convolutions_are_pruned_by_windows_of_their_inputs(name):
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv2d(4, 8, 2), torch.nn.Conv2d(8, 8, 2, groups=2)]
    model, images = torch.nn.Sequential(*convolutions), torch.randn(8, 4, 6, 6)
    norms = torch.nn.functional.unfold(images, 2).square().sum((0, 2)).sqrt()
    scores = (model[0].weight.detach().flatten(1).abs() * norms).unflatten(1, (-1, 4))
    model = quantized_by(model, "int8_wo", PRUNING[name](), exclude=[], data=[images])
    zeros = [(layer.weight == 0).flatten(1).unflatten(1, (-1, 4)) for layer in model]
    assert all((found.sum(-1) >= 2).all() for found in zeros)
    if name == "wanda":
        assert zeros[0].gather(-1, scores.argsort(-1)[..., :2]).all()
