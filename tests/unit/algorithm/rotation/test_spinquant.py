"""Learned rotations: they stay rotations, the loss is the true one and never ends above."""

import pytest
import torch
import torch.nn.functional as F

from quark.torch.algorithm.rotation import spinquant
from quark.torch.algorithm.rotation.rotate import apply, preserve_ones
from quark.torch.algorithm.rotation.spinquant import cayley_step, learn_rotations
from quark.torch.algorithm.rotation.weight_edits import (
    RotationEdits,
    add_stream_rotation,
    add_value_rotation,
)
from quark.torch.numerics.hadamard import hadamard, random_hadamard
from quark.torch.quantization.calibration import calibrate_parameters
from quark.torch.quantization.config.config import RotationConfig
from tests.models.architectures import InDouble, build, small_config, tokens
from tests.unit.algorithm.contexts import context_of, logits_of, outliers


def random_rotation(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]


def from_one(rotation):
    one = torch.eye(len(rotation), dtype=torch.float64)
    return float((rotation.T @ rotation - one).norm())


# ---- steps --------------------------------------------------------------------------------------


def test_steps_find_the_nearest_rotation():
    """Of min |R A - B| the answer is known: U Vᵀ of the singular vectors of B Aᵀ."""
    a = torch.randn(8, 20, dtype=torch.float64)
    b = random_rotation(8, 1) @ a + 0.1 * torch.randn(8, 20, dtype=torch.float64)
    u, _, v = torch.linalg.svd(b @ a.T)
    rotation = random_rotation(8, 2)
    if torch.linalg.det(rotation) * torch.linalg.det(u @ v) < 0:
        rotation[0] *= -1  # the two halves of the orthogonal matrices are not connected
    sign = torch.linalg.det(rotation)
    for step in range(500):
        rotation = cayley_step(rotation, 2 * (rotation @ a - b) @ a.T, rate=0.96**step)
    torch.testing.assert_close(rotation, u @ v, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.linalg.det(rotation), sign)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_many_steps_stay_orthogonal(rate):
    rotation = random_rotation(32)
    for _ in range(300):
        rotation = cayley_step(rotation, torch.randn(32, 32, dtype=torch.float64), rate)
    assert from_one(rotation) < 1e-10


def test_a_small_step_follows_the_gradient():
    """To first order R moves along R Gᵀ R - G, the gradient within the orthogonal matrices."""
    rotation, gradient = random_rotation(6), torch.randn(6, 6, dtype=torch.float64)
    moved = cayley_step(rotation, gradient, 1e-6) - rotation
    expected = rotation @ gradient.T @ rotation - gradient
    torch.testing.assert_close(moved / moved.norm(), expected / expected.norm(), rtol=0, atol=1e-5)
    skew = rotation @ gradient.T - gradient @ rotation.T
    longest = torch.linalg.matrix_norm(skew, 1)
    torch.testing.assert_close(moved * longest * 1e6, expected, rtol=0, atol=1e-4)


def test_steps_that_keep_ones():
    rotation = preserve_ones(random_hadamard(16, torch.Generator().manual_seed(0)))
    start, ones = rotation, torch.ones(16, dtype=torch.float64)
    for _ in range(50):
        gradient = torch.randn(16, 16, dtype=torch.float64)
        rotation = cayley_step(rotation, gradient, 0.5, preserves_ones=True)
    assert from_one(rotation) < 1e-12 and (rotation - start).norm() > 1
    torch.testing.assert_close(rotation @ ones, ones)
    torch.testing.assert_close(ones @ rotation, ones)


def test_no_gradient_no_step():
    rotation = random_rotation(4)
    assert torch.equal(cayley_step(rotation, torch.zeros_like(rotation), 1.0), rotation)


# ---- learning -----------------------------------------------------------------------------------


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(spinquant, "STEPS", 5)


def planned(name="llama", scheme="mxfp4", **changes):
    """A model and how it is rotated."""
    batches = [tokens(40), {"input_ids": tokens(24), "attention_mask": torch.ones(2, 12).long()}]
    model = build(small_config(name, **changes), torch.float32)
    context = context_of(model, scheme, batches=batches)
    edits, stream = RotationEdits(), context.structure.stream
    add_stream_rotation(edits, model, stream)
    rotations = {"stream": hadamard(64)}
    if name == "opt":
        rotations["stream"] = preserve_ones(hadamard(64))
    for heads in stream.value_heads:
        rotations[heads.block] = hadamard(16)
        add_value_rotation(edits, heads, heads.block)
    return context, edits, rotations


def divergence(context, expected):
    """Of the predictions of the model as it is now."""
    total = 0.0
    for batch, target in zip(context.batches, expected, strict=True):
        ids = batch if isinstance(batch, torch.Tensor) else batch["input_ids"]
        found = context.model(ids).logits.flatten(0, 1).log_softmax(-1)
        total += float(F.kl_div(found, target, reduction="batchmean", log_target=True))
    return total / len(expected)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["mxfp4", "ptpc_fp8"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_loss_is_that_of_the_rotated_quantized_model(name, scheme):
    context, edits, rotations = planned(name, scheme, tie_word_embeddings=False)
    wide = {key: spinquant._orthogonal(r) for key, r in rotations.items()}
    with spinquant._RotatedModel(context, edits) as rotated:
        loss = rotated.mean_loss(context.batches, wide)
    ids = [b if isinstance(b, torch.Tensor) else b["input_ids"] for b in context.batches]
    expected = [context.model(i).logits.flatten(0, 1).log_softmax(-1) for i in ids]
    edits.apply_(context.model, rotations)
    assert divergence(context, expected) < 1e-7
    for layer in context.layers.values():
        for quantizer in layer.quantizers().values():
            quantizer.enabled = True
    calibrate_parameters(context.model)
    assert loss == pytest.approx(divergence(context, expected), rel=0.02)
    assert loss > 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_learning_leaves_the_model_alone(name, few_steps, unchanged):
    context, edits, rotations = planned(name, tie_word_embeddings=False)
    with unchanged(context.model):
        found = learn_rotations(context, edits, rotations, preserves_ones=False)
    assert not any(m._forward_hooks for m in context.model.modules())
    assert found.keys() == rotations.keys()
    assert all(from_one(rotation) < 1e-10 for rotation in found.values())


@pytest.mark.parametrize(("rate", "steps"), [(0.2, 30), (1e3, 10)])
@pytest.mark.sampled(2)
def test_the_loss_never_ends_above_the_start(rate, steps, monkeypatch):
    monkeypatch.setattr(spinquant, "RATE", rate)
    context, edits, rotations = planned()
    found = learn_rotations(context, edits, rotations, preserves_ones=False)
    start = {key: spinquant._orthogonal(r) for key, r in rotations.items()}
    with spinquant._RotatedModel(context, edits) as rotated:
        first, last = (rotated.mean_loss(context.batches, r) for r in (start, found))
    assert last <= first
    if rate < 1:
        assert last < 0.97 * first


def test_the_same_each_time(few_steps):
    first, second = (learn_rotations(*planned(), preserves_ones=False) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_gradients_vanish_where_nothing_is_quantized():
    """Then every rotation gives the same model."""
    context, edits, rotations = planned()
    for module in context.model.modules():
        for name in [
            n for n, m in module.named_children() if type(m).__name__ == "TensorQuantizer"
        ]:
            setattr(module, name, None)
    wide = {key: spinquant._orthogonal(r) for key, r in rotations.items()}
    with spinquant._RotatedModel(context, edits) as rotated:
        gradients = rotated.gradients(context.batches[0], wide)
    assert all(float(gradient.abs().max()) < 1e-5 for gradient in gradients.values())


@pytest.mark.parametrize("name", ["llama", "tied", "opt"])
@pytest.mark.sampled(3)
def test_a_model_with_learned_rotations_computes_the_same(name, few_steps):
    model = build(
        small_config("llama" if name == "tied" else name, tie_word_embeddings=name != "llama")
    )
    context = context_of(model)
    with InDouble():
        expected = logits_of(model)
    apply(context, RotationConfig(r2=True, r4=True, trainable=True))
    with InDouble():
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_learning_needs_data():
    context, edits, rotations = planned()
    context.batches.clear()
    with pytest.raises(ValueError, match="needs calibration data"):
        learn_rotations(context, edits, rotations, preserves_ones=False)


def test_a_model_that_overflows_is_refused():
    context, edits, rotations = planned()
    with torch.no_grad():
        context.model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="loss is not finite"):
        learn_rotations(context, edits, rotations, preserves_ones=False)


def test_padding_does_not_count():
    context, edits, rotations = planned()
    wide = {key: spinquant._orthogonal(r) for key, r in rotations.items()}
    ids = tokens(24)
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], 1)
    mask = torch.cat([torch.ones(2, 12), torch.zeros(2, 5)], 1).long()
    with spinquant._RotatedModel(context, edits) as rotated:
        plain = rotated.mean_loss([ids], wide)
        masked = rotated.mean_loss([{"input_ids": padded, "attention_mask": mask}], wide)
    assert masked == pytest.approx(plain, rel=1e-3)


# ---- learned factors ----------------------------------------------------------------------------

SMOOTH = {"r1": True, "r2": True, "trainable": True, "train_smooth": True}


@pytest.mark.parametrize(
    ("name", "positions", "count"),
    [
        ("llama", None, 9),  # two norms, values and the mlp of both blocks, and the last norm
        ("llama", ["v_proj", "up_proj"], 4),
        ("opt", None, 8),  # layer norms with biases, values and the mlp of both blocks
    ],
)
def test_factors_change_nothing_in_float(name, positions, count, monkeypatch):
    """Any factors, between layers whose weights are rotated too."""
    context = context_of(build(small_config(name)))
    learned = []

    def invent(context, edits, rotations, preserves_ones):
        generator = torch.Generator().manual_seed(5)
        learned.extend(n for n, r in rotations.items() if r.dim() == 1)
        return {
            n: torch.randn(len(r), generator=generator, dtype=torch.float64) / 2
            if r.dim() == 1
            else spinquant._orthogonal(r)
            for n, r in rotations.items()
        }

    monkeypatch.setattr(spinquant, "learn_rotations", invent)
    with InDouble():
        expected = logits_of(context.model)
        apply(context, RotationConfig(**SMOOTH, smooth_positions=positions))
        found = logits_of(context.model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    assert len(learned) == count


@torch.no_grad()
def test_factors_are_learned(monkeypatch):
    """Without R1, rotations of values leave the outliers after norms; factors do not."""
    monkeypatch.setattr(spinquant, "STEPS", 5)
    monkeypatch.setattr(spinquant, "FACTOR_RATE", 1.0)  # as far as in more steps
    expected = outliers()(tokens()).logits.log_softmax(-1)
    losses = []
    for train_smooth in (False, True):
        context = context_of(outliers(), "mxfp4")
        apply(context, RotationConfig(**{**SMOOTH, "r1": False, "train_smooth": train_smooth}))
        calibrate_parameters(context.model)
        for layer in context.layers.values():
            for quantizer in layer.quantizers().values():
                quantizer.enabled = True
        predictions = context.model(tokens()).logits.log_softmax(-1)
        losses.append(F.kl_div(predictions, expected, reduction="sum", log_target=True))
    assert losses[1] < 0.9 * losses[0]


def test_positions_that_do_not_exist():
    context = context_of(build(small_config("llama")))
    options = RotationConfig(**SMOOTH, smooth_positions=["v_proj", "q_proj"])
    with pytest.raises(
        ValueError, match=r"has 'q_proj', whose outputs cannot be rescaled .*v_proj"
    ):
        apply(context, options)
