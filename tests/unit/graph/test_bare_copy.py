"""A bare copy runs no hooks and loads no values."""

import torch
from torch import nn

from quark.torch.graph.bare_copy import bare_copy
from quark.torch.graph.changed_parameters import find_changed_parameters
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.memory_limit import MemoryLimit
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch


class Source:
    """Values that must not be read."""

    def read(self, names):
        raise AssertionError(f"{names} were read")


def model_in_parts(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    Residency(model, Source(), MemoryLimit(0, 0, None), Scratch(tmp_path))
    return model


def test_hooks_are_left_out():
    calls = []
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[0].register_forward_hook(lambda *_, **__: calls.append("after"), with_kwargs=True)
    x = torch.ones(1, 3)
    copied = bare_copy(model, {})
    assert torch.equal(copied(x), nn.functional.linear(x, model[0].weight, model[0].bias))
    assert not calls
    model(x)
    assert calls == ["before", "after"]


def test_tensors_are_replaced():
    model = nn.Linear(3, 2)
    zero = nn.Parameter(torch.zeros(2, 3))
    copied = bare_copy(model, {id(model.weight): zero})
    assert copied.weight is zero
    assert copied.bias is not model.bias
    assert torch.equal(copied.bias, model.bias)


def test_values_of_a_model_in_parts_are_not_read(tmp_path):
    model = model_in_parts(tmp_path)
    copied = bare_copy(
        model, {id(p): nn.Parameter(torch.zeros(p.shape)) for p in model.parameters()}
    )
    assert residency_of(copied) is None
    assert torch.equal(copied(torch.ones(1, 3)), torch.zeros(1, 3))


def test_changed_parameters_of_a_model_in_parts_are_found(tmp_path):
    model = model_in_parts(tmp_path)

    def run(empty):
        empty(torch.ones(1, 3, device="meta"))
        with torch.no_grad():
            empty[0].weight.div_(2)

    assert list(find_changed_parameters(model, run)) == ["0.weight"]
    assert residency_of(model).peak == 0
