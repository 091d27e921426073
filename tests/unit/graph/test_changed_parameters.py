"""Parameters that a pass changes are found, whatever the values; others are not."""

import pytest
import torch
from torch import nn

from quark.torch.graph.changed_parameters import find_changed_parameters

NAME = "layer.weight"


class Model(nn.Module):
    def __init__(self, change=None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.change = change
        self.helper = Helper()
        self.is_rescaled = False

    def forward(self, x):
        if self.change is not None:
            self.change(self)
        return self.head(self.layer(self.helper.position_of(x) + x))


class Helper:
    """An object that keeps a tensor of the device of its first input."""

    kept = None

    def position_of(self, x):
        if self.kept is None:
            self.kept = torch.ones(4, device=x.device)
        return self.kept


def divide(model):
    with torch.no_grad():
        model.layer.weight.div_(2)


def divide_data(model):
    model.layer.weight.data.div_(2)


def write_view(model):
    model.layer.weight.detach()[0].zero_()


def rescale(model):
    """What RWKV does: once for each change of the mode."""
    if model.is_rescaled == model.training:
        with torch.no_grad():
            model.layer.weight.mul_(2.0 if model.training else 0.5)
        model.is_rescaled = not model.training


def change_in_training(model):
    if model.training:
        divide(model)


def fail_afterwards(model):
    divide(model)
    if model.layer.weight.sum() > 0:  # needs values
        pass


def find(model):
    return find_changed_parameters(model, lambda empty: empty(torch.ones(2, 4, device="meta")))


@pytest.mark.parametrize("change", [divide, divide_data, write_view, rescale, fail_afterwards])
def test_a_changed_parameter_is_found_with_its_operation(change):
    model = Model(change)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = find(model)
    assert list(found) == [NAME]
    assert found[NAME].startswith("aten.")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training and not model.is_rescaled


def test_one_that_an_earlier_pass_has_changed_is_found():
    model = Model(rescale).eval()
    model(torch.ones(2, 4))
    assert model.is_rescaled
    assert list(find(model)) == [NAME]
    assert model.is_rescaled and not model.training


@pytest.mark.parametrize("change", [None, change_in_training])
def test_a_model_that_changes_nothing_in_evaluation_has_none(change):
    assert find(Model(change)) == {}


def test_an_embedding_that_rescales_its_rows_has_none():
    model = nn.Embedding(8, 4, max_norm=1.0)
    assert find_changed_parameters(model, lambda m: m(torch.ones(2, 4, dtype=torch.long))) == {}


def test_the_model_and_what_it_keeps_are_not_touched():
    model, calls = Model(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    before = torch.get_rng_state()
    find(model)
    assert model.helper.kept is None and not calls
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_copied_is_not_checked():
    model = Model(divide)
    model.generator = (i for i in range(3))
    assert find(model) == {}
