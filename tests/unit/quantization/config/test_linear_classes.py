"""Which subclasses of ``nn.Linear`` compute what it computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router

from quark.torch.quantization.config.linear_classes import operator_class
from quark.torch.quantization.nn.operators import QParamsLinear, QuantLinear


class Marker(nn.Linear):
    """The forward of Linear."""


class Initialized(nn.Linear):
    """Other attributes, which forward does not read."""

    def __init__(self, *args, start="normal"):
        super().__init__(*args)
        self.start = start


class Derived(FalconLinear):
    """A subclass of a subclass."""


class Calling(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


class WithoutBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight)


class Clamped(nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-100, 100), self.weight, self.bias)


class Scaled(nn.Linear):
    """A factor that instances may set."""

    factor = 1.0

    def forward(self, x):
        return self.factor * F.linear(x, self.weight, self.bias)


class InTraining(nn.Linear):
    def forward(self, x):
        return F.dropout(F.linear(x, self.weight, self.bias), 0.1, self.training)


class InFloat32(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias)


class ForMatrices(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) if x.dim() == 2 else x


class WithMask(nn.Linear):
    def forward(self, x, mask):
        return F.linear(x, self.weight, self.bias)


class Hidden(nn.Linear):
    @property
    def weight(self):
        return torch.zeros(1)


@pytest.mark.parametrize("kind", [FalconLinear, Marker, Initialized, Derived, Calling])
def test_subclasses_with_the_product_of_linear(kind):
    assert operator_class(kind) is nn.Linear


OTHERS = [
    *(Doubled, WithoutBias, Clamped, Scaled, InTraining, InFloat32, ForMatrices, WithMask, Hidden),
    *(Llama4Router, NonDynamicallyQuantizableLinear, nn.LazyLinear, QuantLinear, QParamsLinear),
    *(nn.Linear, nn.Embedding, nn.Conv2d, nn.ReLU),
]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_classes_stand_for_themselves(kind):
    assert operator_class(kind) is kind


def test_a_layer_whose_weight_is_computed_keeps_its_class():
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", nn.Tanh())
    assert operator_class(type(layer)) is type(layer)


def test_neither_random_numbers_nor_devices_around_matter():
    class Own(FalconLinear):
        pass

    state = torch.get_rng_state()
    with torch.device("meta"):
        assert operator_class(Own) is nn.Linear
    assert torch.equal(torch.get_rng_state(), state)
