"""The bound of the memory of a process, divided among what needs memory."""

import pytest

from quark.torch.pipeline import memory_limit
from quark.torch.pipeline.activation_store import LIMIT
from quark.torch.pipeline.memory_limit import results_limit


def test_results_of_an_evaluation(monkeypatch):
    monkeypatch.setattr(memory_limit, "taken_memory", lambda: 100)
    assert results_limit(True, 900, "cpu") == 100  # an eighth of what is left
    assert results_limit(False, None, "cpu") == LIMIT // 2
    with pytest.raises(ValueError, match="less than the"):
        results_limit(True, 90, "cpu")
