"""A model is restored bit for bit, in memory and from disk."""

from collections import Counter

import pytest
import torch
from torch import nn

from quark.torch.graph.parameter_writes import record_writes, write_
from quark.torch.pipeline.activation_store import offload_directory
from quark.torch.pipeline.model_state import ModelState, restored, restored_on_failure


class Model(nn.Module):
    """Two parameters share memory, one has two names, and a buffer holds NaN."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 4))
        self.rows = nn.Parameter(self.whole.data[:2])
        self.inner = nn.Linear(4, 4)
        self.inner.again = self.inner.weight
        self.register_buffer("seen", torch.tensor([torch.nan, 1.0]))
        self.names = ["a"]
        self.hook = self.register_forward_hook(lambda *_: None)


def change(model, record):
    with record_writes(record):
        write_(model.rows, torch.ones(2, 4))
        write_(model.whole, torch.zeros(4, 4))
        write_(model.rows, torch.full((2, 4), 7.0))
        write_(model.inner.weight, torch.full((4, 4), torch.nan))
    model.seen[1] = 5
    model.names.append("b")
    model.register_forward_hook(print)
    model.train(False).extra = 3
    model.inner.weight.requires_grad_(False)
    model.inner.__class__ = nn.Identity
    model.inner.bias = None
    del model.whole


@pytest.mark.parametrize("limit", [0, 20, 1 << 30])
def test_everything_is_restored(limit, unchanged, tmp_path):
    model = Model()
    attributes = dict(vars(model)), dict(model._forward_hooks), list(model.names)
    with unchanged(model), offload_directory(tmp_path):
        state = ModelState(model, limit)
        change(model, state.record)
        state.restore()
        state.restore()  # again, as after an interrupt
        state.forget()
    assert (dict(vars(model)), dict(model._forward_hooks), list(model.names)) == attributes
    assert model.rows.data_ptr() == model.whole.data_ptr() and model.inner.weight.requires_grad
    assert not list(tmp_path.iterdir())
    model.hook.remove()
    assert not model._forward_hooks


@pytest.fixture
def restorations(monkeypatch):
    """Count the calls of ``ModelState.restore``. The user interrupts two of them."""
    calls, restore = Counter(), ModelState.restore

    def interrupted(state):
        calls["restore"] += 1
        if calls["restore"] < 3:
            raise KeyboardInterrupt
        restore(state)

    monkeypatch.setattr(ModelState, "restore", interrupted)
    return calls


def test_an_interrupt_meanwhile_waits(unchanged, restorations):
    model = Model()
    with (
        unchanged(model),
        pytest.raises(RuntimeError, match="first"),
        restored_on_failure(model) as record,
    ):
        change(model, record)
        raise RuntimeError("the first")
    assert restorations["restore"] == 3


def test_an_interrupt_meanwhile_is_not_lost(restorations):
    model = Model()
    with pytest.raises(KeyboardInterrupt), restored(model):
        model.names.append("b")
    assert restorations["restore"] == 3
    assert model.names == ["a"]


def test_success_keeps_the_changes():
    model = Model()
    with restored_on_failure(model) as record, record_writes(record):
        write_(model.whole, torch.zeros(4, 4))
    assert not bool(model.whole.any())
    with restored(model):
        model.extra = 1
    assert not hasattr(model, "extra")


def test_loops_that_were_broken_off_end_before(unchanged):
    """A traceback that is kept does not keep them, so they change nothing later."""
    model, ends = Model(), []

    def loop():
        try:
            yield 1
        finally:
            ends.append(len(ends))

    def run():
        for _ in loop():
            raise RuntimeError

    with pytest.raises(RuntimeError) as kept, restored_on_failure(model):
        run()
    assert ends == [0] and kept.value.__traceback__ is not None
