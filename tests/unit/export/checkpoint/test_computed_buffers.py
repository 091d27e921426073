"""Buffers that no checkpoint stores have the values that the model gives them, or are refused."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from quark.torch.export.checkpoint.computed_buffers import compute_buffers
from quark.torch.export.recognition import load_checkpoint, load_in_float

CPU = torch.device("cpu")


class Part(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factors", values, persistent=False)


class Model(nn.Module):
    """A model whose parts cannot initialize themselves, as those of Transformers."""

    def __init__(self, init):
        super().__init__()
        self.parts = nn.ModuleList(Part(torch.arange(6.0)) for _ in range(2))
        self.init = init

    def _init_weights(self, module):
        self.init(self, module)


def write_own(model, module):
    if isinstance(module, Part):
        with torch.no_grad():
            module.linear.weight.fill_(7.0)
            module.factors.copy_(torch.arange(6.0))


def write_those_of_parts(model, module):
    """What Falcon-H1 does: the model around the parts writes their buffers."""
    if module is model:
        for part in model.parts:
            part.factors.copy_(torch.arange(6.0))


def write_twice(model, module):
    """The model around has the last word, as in Transformers, which begins with the innermost."""
    if isinstance(module, Part):
        module.factors.fill_(9.0)
    write_those_of_parts(model, module)


def write_some(model, module):
    if isinstance(module, Part):
        module.factors[:5].copy_(torch.arange(5.0))


def change(model, module):
    if isinstance(module, Part):
        module.factors.mul_(2.0)


def write_at_random(model, module):
    if isinstance(module, Part):
        module.factors.normal_()


def empty(init):
    """A model on the meta device, with weights that were read."""
    with torch.device("meta"):
        model = Model(init)
    for part in model.parts:
        part.linear.weight = nn.Parameter(torch.ones(4, 4))
    return model


@pytest.mark.parametrize("init", [write_own, write_those_of_parts, write_twice])
def test_the_innermost_module_or_one_around_it_computes_them(init):
    model = empty(init)
    compute_buffers(model, CPU)
    for part in model.parts:
        assert torch.equal(part.factors, torch.arange(6.0))
        assert torch.equal(part.linear.weight, torch.ones(4, 4))  # what was read stays
        assert part.linear.bias.is_meta


@pytest.mark.parametrize("init", [write_some, change, write_at_random, lambda model, module: None])
def test_values_that_are_not_written_or_are_random_are_refused(init):
    model = empty(init)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"parts\.0\.factors, parts\.1\.factors are not stored"):
        compute_buffers(model, CPU)
    assert all(part.factors.is_meta for part in model.parts)
    assert torch.equal(model.parts[0].linear.weight, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_those_that_are_read_later_are_left():
    model = empty(write_own)
    compute_buffers(model, CPU, {"parts.0.factors"})
    assert model.parts[0].factors.is_meta
    assert torch.equal(model.parts[1].factors, torch.arange(6.0))


class TestFalconH1:
    """The model around its layers writes factors into buffers of the layers."""

    SIZES: ClassVar = {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 0.125],
    }

    @pytest.mark.parametrize("max_memory", [None, 1 << 40])
    def test_a_loaded_checkpoint_has_the_bits_of_the_model(
        self, build, quantize, export, batches, max_memory
    ):
        model = quantize(build("falcon_h1", **self.SIZES), "int8_wo")
        path = export(model)
        found = load_checkpoint(path, max_memory=max_memory)
        with torch.no_grad():
            assert torch.equal(found(batches[0]).logits, model(batches[0]).logits)
        in_float = dict(load_in_float(path, max_memory=max_memory).named_buffers())
        for layer in (0, 1):
            name = f"model.layers.{layer}.mamba.mup_vector"
            assert torch.equal(in_float[name], model.get_buffer(name))
            assert len(in_float[name].unique()) == 5
