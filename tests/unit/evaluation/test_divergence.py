"""Divergence of predictions, a few positions at a time."""

import pytest
import torch

from quark.torch.evaluation import divergence
from quark.torch.evaluation.divergence import kl_divergence


@pytest.fixture
def predictions():
    torch.manual_seed(3)
    return torch.randn(2, 3, 7, 11).log_softmax(-1)  # two models, (windows, positions, classes)


@pytest.mark.parametrize("at_once", [1, 23, 1 << 20])
def test_the_definition(predictions, at_once, monkeypatch):
    monkeypatch.setattr(divergence, "AT_ONCE", at_once)
    p, q = predictions
    expected = torch.nn.functional.kl_div(q.double(), p.double(), log_target=True, reduction="none")
    found = kl_divergence(p, q)
    assert found.shape == (3, 7) and found.dtype == torch.float64
    torch.testing.assert_close(found, expected.sum(-1), rtol=1e-5, atol=1e-6)


def test_the_number_at_once_changes_no_bit(predictions, monkeypatch):
    whole = kl_divergence(*predictions)
    monkeypatch.setattr(divergence, "AT_ONCE", 30)
    assert torch.equal(kl_divergence(*predictions), whole)


def test_the_memory_does_not_grow_with_the_positions():
    """Beside the results, that is: the largest of the tensors that are made."""
    sizes = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() > 1:
                sizes.append(result.untyped_storage().nbytes())
            return result

    p, q = torch.randn(2, 64, 1 << 16).log_softmax(-1)
    own = p.untyped_storage().nbytes()
    with Sizes():
        kl_divergence(p, q)
    assert max(size for size in sizes if size != own) == 4 << 20
