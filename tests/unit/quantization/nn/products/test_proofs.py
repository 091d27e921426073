"""The values of one weight prove the kernels for all alike; others prove codes and scales."""

import pytest
import torch
from torch import nn

from quark.torch.quantization.nn.products import product
from quark.torch.quantization.nn.products.panels import Panels
from tests.configurations import config, groups
from tests.unit.quantization.nn.test_runtime import packed

SPECS = {"int4": groups("int4", True), "uint4": groups("uint4", False)}


@pytest.fixture
def proofs(monkeypatch):
    """The weights whose values were compared."""
    proofs, gives = [], product.PanelMethod.gives

    def count(self, parts, values, use):
        proofs.append(parts)
        return gives(self, parts, values, use)

    monkeypatch.setattr(product.PanelMethod, "gives", count)
    return proofs


def fast_layer(name, outputs=40, scale=1.0):
    """Return a new layer that computes by its product, and its values before."""
    linear = nn.Linear(64, outputs)
    linear.weight.data *= scale
    layer, _ = packed(linear, config(SPECS[name], exclude=()), torch.randn(3, 64))
    expected = layer.value("weight")
    layer.set_runtime("fast")
    return layer, expected


@pytest.mark.parametrize("name", SPECS)
def test_first_weight_of_a_kind_is_proved(name, proofs):
    fast_layer(name)
    first = len(proofs)
    assert first
    layer, expected = fast_layer(name)
    assert len(proofs) == first
    assert torch.equal(layer.value("weight"), expected)
    fast_layer(name, outputs=72)
    assert len(proofs) > first


@pytest.mark.parametrize("scale", [1e-38, 1e30])
def test_weights_with_extreme_scales_are_proved_one_by_one(scale, proofs):
    fast_layer("int4")
    first = len(proofs)
    layer, expected = fast_layer("int4", scale=scale)
    assert len(proofs) > first
    assert torch.equal(layer.value("weight"), expected)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [("int4", "scale", 2), ("uint4", "scale", 2), ("uint4", "zero_point", 1)],
)
def test_weight_with_other_factors_has_no_product(name, part, change, proofs, monkeypatch):
    """After a first weight has been proved, one factor of the second is wrong."""
    fast_layer(name)
    pack = Panels.pack

    def wrong_pack(state, arrangement):
        panels, parts = pack(state, arrangement)
        parts[part].flatten()[3:4].add_(change)
        return panels, parts

    monkeypatch.setattr(Panels, "pack", wrong_pack)
    first = len(proofs)
    layer, expected = fast_layer(name)
    assert len(proofs) > first
    assert layer.packed_product is None
    assert torch.equal(layer.value("weight"), expected)
