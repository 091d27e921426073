"""The loss against a float model, against its formula in float64."""

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.training import distillation_loss

STUDENT, TEACHER = torch.randn(2, 2, 5, 11, generator=torch.Generator().manual_seed(0)) * 3
MASK = torch.tensor([[True, False, True, True, False], [False] * 4 + [True]])


def divergence(temperature, rows):
    p, q = ((x[rows].double() / temperature).softmax(-1) for x in (TEACHER, STUDENT))
    return ((p * (p / q).log()).sum(-1).mean() * temperature**2).item()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence(temperature):
    everything = torch.ones_like(MASK)
    loss = distillation_loss(STUDENT, TEACHER, temperature)
    assert loss.item() == pytest.approx(divergence(temperature, everything), rel=1e-5)
    loss = distillation_loss(STUDENT, TEACHER, temperature, MASK)
    assert loss.item() == pytest.approx(divergence(temperature, MASK), rel=1e-5)
    assert distillation_loss(TEACHER, TEACHER, temperature).item() == pytest.approx(0, abs=1e-6)


def test_gradient_goes_to_the_student_alone():
    """The gradient of the divergence by the logits is T * (q - p) / positions."""
    student, teacher = (x.clone().requires_grad_() for x in (STUDENT, TEACHER))
    distillation_loss(student, teacher, 2.0, MASK).backward()
    expected = 2.0 * ((STUDENT / 2).softmax(-1) - (TEACHER / 2).softmax(-1)) / MASK.sum()
    torch.testing.assert_close(student.grad, expected * MASK.unsqueeze(-1), atol=1e-6, rtol=1e-5)
    assert teacher.grad is None


def test_hidden_states():
    own, other = torch.randn(2, 3, 2, 5, 6)
    loss = distillation_loss(
        STUDENT, TEACHER, 1.0, MASK, list(own), list(other), hidden_weight=0.5
    ) - distillation_loss(STUDENT, TEACHER, 1.0, MASK)
    expected = (
        0.5 * sum((a[MASK] - b[MASK]).square().mean() for a, b in zip(own, other, strict=True)) / 3
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_nothing_counts():
    loss = distillation_loss(STUDENT, TEACHER, 1.0, torch.zeros_like(MASK), [STUDENT], [TEACHER])
    assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STUDENT, TEACHER, 0.0), "temperature=0.0"),
        ((STUDENT, TEACHER[:1]), r"teacher_logits: expected \(2, 5, 11\), got \(1, 5, 11\)"),
        ((STUDENT, TEACHER, 1.0, MASK[:, :3]), r"mask: expected \(2, 5\), got \(2, 3\)"),
        ((STUDENT, TEACHER, 1.0, None, [STUDENT]), "give as many of both"),
        ((STUDENT, TEACHER, 1.0, None, [STUDENT], [TEACHER[:1]]), "teacher_hidden_states: expect"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        distillation_loss(*arguments)


def test_a_quantized_model_comes_closer_to_its_float_model(build):
    teacher = build()
    model = ModelQuantizer(Config(scheme("int3_wo_32"), exclude=["lm_head"])).quantize_model(
        build()
    )
    ids = torch.randint(3, 64, (8, 16))
    with torch.no_grad():
        target = teacher(ids).logits
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = distillation_loss(model(ids).logits, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
