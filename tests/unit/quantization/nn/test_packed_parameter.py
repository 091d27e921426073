"""A packed layer answers questions about its weight as the float layer would."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.nn.packed_parameter import PackedParameter

SCHEMES = ["int8", "fp8", "int4_wo_32"]
LAYER = "model.layers.0.self_attn.q_proj"


def _save_and_load(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.fixture(params=SCHEMES)
def loaded(request, build, quantize, export):
    """A model that was read back, and its layer."""
    path = export(quantize(build(num_hidden_layers=1), request.param))
    model = load_checkpoint(path)
    return model, model.get_submodule(LAYER)


def test_type_shape_and_device(loaded):
    model, layer = loaded
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {model.dtype}
    assert layer.weight.shape == (64, 64) and layer.weight.is_floating_point()
    assert sum(p.numel() for p in layer.parameters()) == 64 * 64
    assert isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad
    assert layer.state_dict()["weight"].dtype != torch.float32


def test_operations_compute_with_the_values(loaded):
    _, layer = loaded
    values, x = layer.value("weight"), torch.randn(3, 64)
    assert torch.equal(F.linear(x, layer.weight), F.linear(x, values))
    assert torch.equal(x @ layer.weight.t(), x @ values.t())
    assert torch.equal(layer.weight[:5].abs().sum(1), values[:5].abs().sum(1))
    assert torch.equal(layer.weight.to(torch.float16), values.half())
    assert type(layer.weight.clone()) is torch.Tensor


VIEWS = {
    "detach": torch.Tensor.detach,
    "data": lambda x: x.data,
    "t": torch.Tensor.t,
    "view": lambda x: x.view(-1),
    "row": lambda x: x[3],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_taken_in_inference_mode_too(loaded, view):
    """``detach`` failed there, and with it every check of the parameters and ``state_dict``."""
    model, layer = loaded
    values, before = layer.value("weight"), layer.state_dict()
    with torch.inference_mode():
        seen = view(layer.weight)
        assert torch.equal(seen + 0, view(values))
        stored = model.state_dict()
    assert torch.equal(view(layer.weight) + 0, view(values))
    for name, tensor in before.items():
        own = stored[f"{LAYER}.{name}"]
        assert own.dtype == tensor.dtype and torch.equal(own.float(), tensor.float())


def test_conversions_change_the_values_alone(loaded):
    model, layer = loaded
    stored, values = layer.state_dict()["weight"].clone(), layer.value("weight")
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.state_dict()["weight"].view(torch.uint8), stored.view(torch.uint8))
    error = (layer.value("weight").float() - values).norm() / values.norm()
    assert layer.weight.dtype == torch.bfloat16 and error < 0.01


@pytest.mark.parametrize("copied", [copy.deepcopy, _save_and_load], ids=["copy", "pickle"])
def test_copies(loaded, copied):
    _, layer = loaded
    other = copied(layer)
    assert [p.dtype for p in other.parameters()] == [torch.float32]
    other.state_dict()["weight"].zero_()
    assert torch.equal(layer.weight + 0, layer.value("weight"))
    assert not torch.equal(layer.value("weight"), other.value("weight"))


def test_codes_are_loaded_by_name(loaded):
    _, layer = loaded
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    values = layer.value("weight")
    layer.state_dict()["weight"].zero_()
    assert not torch.equal(layer.value("weight"), values)
    layer.load_state_dict(state)
    assert torch.equal(layer.weight + 0, values)


def test_writing_is_refused(loaded):
    _, layer = loaded
    with torch.no_grad(), pytest.raises(RuntimeError, match="writes to a packed weight"):
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="takes codes"):
        layer.weight.data = torch.zeros(64, 64)


def test_memory_is_that_of_the_codes(loaded):
    model, layer = loaded
    stored = sum(t.nbytes for t in layer.state_dict().values())
    size = layer.weight.numel() * layer.weight.element_size()
    assert size == 64 * 64
    assert stored < 2 * size
    assert model.get_memory_footprint() < 4 * sum(p.numel() for p in model.parameters())


def test_a_dropped_model_is_freed_at_once(loaded):
    _, layer = loaded
    layer = copy.deepcopy(layer)
    weight, alive = layer.weight, weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="was dropped"):
        weight + 1


def test_what_places_modules_may_make_parameters_anew(loaded):
    """As accelerate does: to meta and back with codes, written past ``setattr``."""
    _, layer = loaded
    values, codes = layer.value("weight"), layer.state_dict()["weight"]
    kind = type(layer._parameters["weight"])
    assert kind is PackedParameter
    layer._parameters["weight"] = kind(layer.weight.to("meta"), requires_grad=False)
    assert layer.weight.shape == codes.shape and layer.weight.dtype == codes.dtype
    layer._parameters["weight"] = type(layer.weight)(codes, requires_grad=False)
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.value("weight"), values)
    layer._parameters["weight"] = kind(layer.weight.to("cpu"), requires_grad=False)
    assert torch.equal(layer.value("weight"), values)


def test_another_type_on_loading(build, quantize, export):
    model = load_checkpoint(export(quantize(build("opt"), "fp8")), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
