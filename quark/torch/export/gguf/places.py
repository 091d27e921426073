"""Where the tensors of a GGUF file are in a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from quark.torch.export.gguf.architectures import (
    TENSOR_SCALE,
    Architecture,
    matrices_of,
    tensor_names,
)
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts

SCALE = TENSOR_SCALE.removeprefix(".")
ROUTER = ".ffn_gate_inp.weight"  # ends the name of the weight of a router in the file


class Place(NamedTuple):
    """Where values are in the model.

    Attributes:
        owner: Name of a module.
        attribute: Name of its parameter or buffer. The bias of a quantized layer may be quantized.
            The tensor scale of its weight is called as in GGUF.
        rows: The rows of its tensor.
    """

    owner: str
    attribute: str
    rows: slice = slice(None)

    @property
    def key(self) -> str:
        """Name of the tensor in the model."""
        return f"{self.owner}.{self.attribute}" if self.owner else self.attribute


class StoredTensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        places: Where its values are in the model: one place, or one for each expert.
        is_stack: Whether the first axis is that of the experts.
    """

    places: tuple[Place, ...]
    is_stack: bool

    @property
    def owners(self) -> list[str]:
        """Names of the modules that hold its values."""
        return [place.owner for place in self.places]


def stored_tensors(model: nn.Module, architecture: Architecture) -> dict[str, StoredTensor]:
    """Return the tensors of the file by their names, in the order of the model, tied ones once.

    Args:
        model: The model, its experts split.
        architecture: How its family is stored.

    Raises:
        ValueError: A tensor has no name in GGUF.
    """
    stacks = {  # name of a linear layer of an expert -> layer of experts, name in the expert
        f"{path}.{name}": (path, name.partition(".")[2])
        for path, module in model.named_modules()
        if isinstance(module, LinearExperts)
        for stack in module.stacks.values()
        for name in stack.layer_names(module.num_experts)
    }
    groups: dict[str, list[Place]] = {}  # by the name in the model, without the number of an expert
    for place in _places(model):
        if place.owner not in stacks:
            groups[place.key] = [place]
            continue
        path, part = stacks[place.owner]
        matrices = matrices_of(part, architecture)
        for number, matrix in enumerate(matrices):
            rows = slice(number, None, len(matrices))
            common = f"{path}.{matrix}.{place.attribute}"
            groups.setdefault(common, []).append(place._replace(rows=rows))
    names = tensor_names(architecture, model, groups)
    return {
        names[key]: StoredTensor(tuple(places), places[0].owner in stacks)
        for key, places in groups.items()
    }


def has_tensor_scale(layer: QuantizedLayer) -> bool:
    """Whether a number beside the weight of a layer multiplies its blocks."""
    weight = layer.quant_config.weight
    return weight is not None and weight.scheme.scale.two_level


def _places(model: nn.Module) -> list[Place]:
    """Return where the tensors of the file are, in the order of the model, tied ones once."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    modules = dict(model.named_modules(remove_duplicate=False))
    every_name = {n for n, m in modules.items() if isinstance(m, QuantizedLayer)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    places = []
    for key, tensor in state.items():
        owners = {key.rsplit(".", 1)[0], key.rsplit(".", 2)[0]}
        is_copy = key in tied and tensor.data_ptr() == state[tied[key]].data_ptr()
        if not owners & every_name and not is_copy:
            owner, _, attribute = key.rpartition(".")
            places.append(Place(owner, attribute))
    for name, layer in layers.items():
        places.append(Place(name, "weight"))
        if has_tensor_scale(layer):
            places.append(Place(name, SCALE))
        if getattr(layer, "bias", None) is not None:
            places.append(Place(name, "bias"))
    order = {name: number for number, name in enumerate(modules)}
    return sorted(places, key=lambda place: order[place.owner])
