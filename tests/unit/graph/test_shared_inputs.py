"""Layers that read one tensor are found by running the model; names play no part."""

import pytest
import torch
from torch import nn

from quark.torch.graph.shared_inputs import first_readers, same_input_groups


class Block(nn.Module):
    """Two layers read x, one reads what they give, and one reads an equal copy of x."""

    def __init__(self):
        super().__init__()
        self.ant, self.bee, self.cat, self.dog = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.cat(self.ant(x) + self.bee(x)) + self.dog(x.clone())


class Reads(nn.Module):
    """Two layers read x through ``first`` and ``second``."""

    def __init__(self, first, second):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = first, second

    def forward(self, x):
        return self.left(self.first(x)) + self.right(self.second(x))


def find(model, x=None):
    x = torch.randn(2, 4) if x is None else x
    return same_input_groups(model, lambda: model(x))


def test_layers_of_one_input_are_siblings():
    assert find(Block()) == [["ant", "bee"]]


def test_each_parent_has_its_own_groups():
    model = nn.Sequential(Block(), Block())
    assert find(model) == [["0.ant", "0.bee"], ["1.ant", "1.bee"]]


def test_layers_of_different_parents_are_no_siblings():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ModuleDict({"x": nn.Linear(4, 4)})
            self.b = nn.ModuleDict({"x": nn.Linear(4, 4)})

        def forward(self, x):
            return self.a["x"](x) + self.b["x"](x)

    assert find(Two()) == []


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (lambda x: x, [["left", "right"]]),
        (lambda x: x.view(2, 4), [["left", "right"]]),
        (lambda x: x[:1], []),
        (lambda x: x * 1, []),
    ],
    ids=["same", "same view", "part", "copy"],
)
def test_what_counts_is_the_memory(second, expected):
    assert find(Reads(lambda x: x, second)) == expected


def test_what_is_written_in_place_is_another_input():
    assert find(Reads(lambda x: x, lambda x: x.add_(1))) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("abcd", {"a": "a", "b": "b", "c": "a", "d": "b"}),
        ("cda", {"c": "c", "d": "d", "a": "c"}),
        ("xd", {"x": "x", "d": "d"}),
    ],
)
def test_the_first_of_the_given_layers_stands_for_the_others(names, expected):
    assert first_readers(names, [("a", "c"), ("b", "d", "e")]) == expected


def test_freed_memory_is_not_taken_for_the_same_tensor():
    """Without references, the second copy would most likely lie where the first one lay."""

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.left(x.clone())
            return self.right(x.clone())

    assert find(Copies()) == []


def test_a_layer_that_runs_twice_is_listed_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.left(x) + self.left(x) + self.right(x)

    assert find(Twice()) == [["left", "right"]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        ("opt", [("q_proj", "k_proj", "v_proj")]),
    ],
)
def test_language_models(build, name, expected):
    model = build(name)
    groups = same_input_groups(model, lambda: model(torch.ones(1, 8, dtype=torch.int64)))
    endings = [tuple(sorted(n.rpartition(".")[2] for n in group)) for group in groups]
    assert endings == [tuple(sorted(group)) for group in expected] * 2


def test_the_model_is_not_changed(build, unchanged):
    model = build()
    with unchanged(model):
        same_input_groups(model, lambda: model(torch.ones(1, 8, dtype=torch.int64)))
        with pytest.raises(RuntimeError, match="stop"):
            same_input_groups(model, stop)
    assert not any(module._forward_pre_hooks for module in model.modules())


def stop():
    raise RuntimeError("stop")
