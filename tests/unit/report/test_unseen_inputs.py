"""Inputs that calibration hardly saw, against eigenvectors and against a text that we know."""

import pytest
import torch

from quark.torch.evaluation.predictions import Reference
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.report.measurement import measure
from quark.torch.report.unseen_inputs import (
    CalibrationText,
    TokenInputs,
    find_unseen_inputs,
    unseen_energy,
)
from quark.torch.statistics.collection import collect_statistics
from tests.unit.report.test_measurement import quantized  # noqa: F401  a fixture

KNOWN = torch.randint(3, 30, (8, 16), generator=torch.Generator().manual_seed(1))
NEW = torch.arange(40, 48)  # tokens that are not in KNOWN


def text():
    """Windows of known tokens with new ones in the middle of the second."""
    windows = KNOWN[:3].clone()
    windows[1, 4:12] = NEW
    return windows


def last(tokens):
    return str(tokens[-1])


def test_the_share_of_each_eigenvector():
    torch.manual_seed(0)
    x, vectors = torch.randn(7, 12), torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    values = torch.logspace(-8, 2, 12, dtype=torch.float64)
    gram = vectors @ values.diag() @ vectors.T
    damping = 0.01 * values.mean()
    expected = (damping / (values + damping) * (x.double() @ vectors).square()).sum(1)
    [[unseen, whole]] = unseen_energy(gram.float(), x)
    torch.testing.assert_close(unseen, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole, x.double().square().sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_new_tokens_are_found(build, batch_size):
    model, windows = build("llama"), text()
    statistics = collect_statistics(model, [KNOWN], probes=0)
    with ActivationStore() as logits, ActivationStore() as store:
        inputs = TokenInputs(list(statistics.inputs), windows, store)
        Reference(logits).run(model, windows, batch_size, observe=lambda: inputs.record(model))
        unseen = find_unseen_inputs(inputs, CalibrationText(statistics, last))
        assert inputs.layers == list(statistics.inputs)
    assert {(t.window, t.position) for t in unseen.tokens[:8]} == {(1, i) for i in range(4, 12)}
    assert {int(t.text) for t in unseen.tokens[:8]} == set(NEW.tolist())
    ratios = [token.ratio for token in unseen.tokens]
    assert ratios == sorted(ratios, reverse=True) and ratios[7] > 2 * ratios[8]
    assert unseen.text > 1.2 * unseen.calibration
    assert all(0 < share < 1 for pair in unseen.layers.values() for share in pair)


def test_the_text_of_calibration_is_seen(build):
    model = build("llama")
    statistics = collect_statistics(model, [KNOWN], probes=0)
    with ActivationStore() as store:
        inputs = TokenInputs(list(statistics.inputs), KNOWN, store)
        with inputs.record(model), torch.no_grad():
            model(KNOWN)
        unseen = find_unseen_inputs(inputs, CalibrationText(statistics))
    for share, usual in unseen.layers.values():
        assert share == pytest.approx(usual, rel=1e-4)


def test_a_report_compares_the_original(quantized, build):  # noqa: F811
    original, path, _ = quantized("int4_wo_32")
    statistics = collect_statistics(build("llama"), [KNOWN], probes=0)
    report = measure(path, original, text(), calibration=CalibrationText(statistics))
    assert report.unseen.text > 1.2 * report.unseen.calibration
    assert any("calibration hardly saw" in sentence for sentence in report.verdict)
    assert report.to_dict()["unseen"]["tokens"][0]["text"].split()[-1] in map(str, NEW.tolist())
    assert measure(path, original, text()).unseen is None


def test_statistics_of_another_model_are_refused(quantized, build):  # noqa: F811
    original, path, _ = quantized("int4_wo_32")
    other = build("llama")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    statistics = collect_statistics(other, [KNOWN], probes=0)
    with pytest.raises(ValueError, match="statistics are of another model"):
        measure(path, original, text(), calibration=CalibrationText(statistics))
    with pytest.raises(ValueError, match="give both"):
        measure(path, original, calibration=CalibrationText(statistics))
