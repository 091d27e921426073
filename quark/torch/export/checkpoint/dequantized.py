"""The float model of a quantized checkpoint: each of its tensors is dequantized when it is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from quark.torch.export.checkpoint.computed_buffers import compute_buffers
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.checkpoint.placement import put_tensor, tie
from quark.torch.export.checkpoint.reader import Loading, Reader, zero_offset
from quark.torch.export.checkpoint.value_checks import check_layer_values
from quark.torch.numerics.finite import check_finite
from quark.torch.quantization.config.tensor_names import LOW_RANK, PRESCALE
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.packed import PackedLayer


class FloatReader(Reader, Protocol):
    """Tensors of a float model that a quantized checkpoint describes, under its names."""

    def fill(self, model: nn.Module) -> nn.Module:
        """Read all tensors into a float model on the meta device, in place, and return it."""
        ...


class DequantizedReader:
    """Tensors of the float model that a quantized checkpoint describes.

    Only one tensor is in memory at a time, with its codes: all experts of a stack are one.
    Products of codes and scales are rounded once, to the type of the result.

    Args:
        loading: The checkpoint, as ``open_checkpoint`` returns it. It is not filled.
        model: The float architecture on the meta device.
        dtype: Type of all float parameters; by default that of the model for quantized ones, and
            the stored one for others.

    Attributes:
        entries: Headers of the tensors by the names of the float model. Tied tensors that are not
            stored are left out.
    """

    def __init__(
        self, loading: Loading, model: nn.Module, dtype: torch.dtype | None = None
    ) -> None:
        self.loading, self.dtype = loading, dtype
        entries = loading.reader.entries
        self.keys = {loading.fmt.state_name(key): key for key in entries}  # names in the state
        self.entries: dict[str, TensorHeader] = {}
        for name, tensor in model.state_dict().items():
            key = self.keys.get(self._first_part(name))
            if key is not None:
                kind = tensor.dtype if self._is_quantized(name) else entries[key].dtype
                kind = self._type_of(kind)
                self.entries[name] = TensorHeader(entries[key].file, tuple(tensor.shape), kind)

    @torch.no_grad()
    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            ValueError: A scale is not finite, or not positive.
        """
        header, (path, _, attribute) = self.entries[name], name.rpartition(".")
        owner = self.loading.model.get_submodule(path)
        if not isinstance(owner, LinearExperts):
            return self.value(path, attribute, header.dtype)
        values = torch.empty(header.shape, dtype=header.dtype, device="cpu")
        stack, kind = _stack_name(attribute)
        for place, part in owner.stacks[stack].split(values):
            part.copy_(self.value(f"{path}.{place}", kind, header.dtype))
        return values

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors, in the order of the model."""
        for name in self.entries:
            yield name, self.tensor(name)

    def adapt(self, model: nn.Module) -> None:
        """Give the parameters of a float model the types of the tensors, in place.

        Tied parameters that are stored apart are untied.

        Args:
            model: The model, on the meta device.
        """
        for name, source in self.loading.tied.items():
            if name in self.entries and source in self.entries:
                put_tensor(model, name, model.state_dict()[name].clone())
                model.config.tie_word_embeddings = False  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            if name in self.entries:
                parameter.data = parameter.data.to(self.entries[name].dtype)

    def fill(self, model: nn.Module) -> nn.Module:
        """Read all tensors into a float model on the meta device, in place, and return it.

        Raises:
            ValueError: A scale is not finite, or not positive; or a parameter is not finite.
        """
        return fill_model(model, self, self.loading.tied)

    def _first_part(self, name: str) -> str:
        """Return the first name in the state of the packed model that a tensor is made of."""
        path, _, attribute = name.rpartition(".")
        owner = self.loading.model.get_submodule(path)
        if not isinstance(owner, LinearExperts):
            return name
        stack, kind = _stack_name(attribute)
        return f"{path}.{owner.stacks[stack].layer_names(owner.num_experts)[0]}.{kind}"

    def _is_quantized(self, name: str) -> bool:
        """Whether a tensor, or a part of it, may be stored quantized."""
        owner = self.loading.model.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, (LinearExperts, PackedLayer))

    def _type_of(self, dtype: torch.dtype) -> torch.dtype:
        is_wide = dtype.is_floating_point and dtype.itemsize > 1
        return self.dtype if is_wide and self.dtype is not None else dtype

    def value(self, path: str, attribute: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter or buffer of one module in float; experts are split.

        Args:
            path: Name of the module.
            attribute: Name of the tensor in it.
            dtype: Type of the result, to which products of codes and scales are rounded.
        """
        owner = self.loading.model.get_submodule(path)
        if isinstance(owner, PackedLayer):
            return self._dequantize(owner, path, attribute, dtype)
        return self._stored(f"{path}.{attribute}" if path else attribute).to(dtype)

    def _stored(self, name: str) -> torch.Tensor:
        """Return a tensor of the state of the packed model."""
        key, expected = self.keys[name], self.loading.outline[name]
        value = self.loading.fmt.convert_loaded(key, self.loading.reader.tensor(key))
        return value.reshape(expected.shape)

    def _dequantize(
        self, owner: PackedLayer, path: str, attribute: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weight or the bias of a packed layer, for its inputs as they are."""
        layer = copy.deepcopy(owner)  # on the meta device
        beginnings = (f"{attribute}_", "input_rotation", PRESCALE, *LOW_RANK)
        for part, empty in owner.state_dict().items():
            name = f"{path}.{part}"
            if part != attribute and not part.startswith(beginnings):
                continue
            if name in self.keys:
                put_tensor(layer, part, self._stored(name))
            elif part.endswith(".zero_point"):
                put_tensor(layer, part, zero_offset(layer, part, empty, torch.device("cpu")))
            elif part.endswith("_groups"):
                put_tensor(layer, part, None)  # in order
        check_layer_values(layer, path)
        is_whole = layer.is_merged or attribute != "weight"
        value = layer.value(attribute, dtype if is_whole else torch.float32)
        assert value is not None
        return value if is_whole else layer.merged_weight(value).to(dtype)


def fill_model(model: nn.Module, reader: Reader, tied: Mapping[str, str]) -> nn.Module:
    """Read all tensors into a float model on the meta device, in place, and return it.

    Args:
        model: The model.
        reader: Its tensors, under its names.
        tied: Names of tied tensors -> names of the tensors that they are tied to.

    Raises:
        ValueError: A tensor cannot be read, or a parameter has values that are not finite.
    """
    absent = [name for name in model.state_dict() if name not in reader.entries]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in reader.tensors():
        if name in parameters:
            check_finite(name, tensor)  # as models that are read in parts do
        put_tensor(model, name, tensor)
    compute_buffers(model, torch.device("cpu"))
    tie(model, tied, absent)
    return model.eval()


def _stack_name(attribute: str) -> tuple[str, str]:
    """Return the name of a stack, and what it holds: its matrices or their biases."""
    stack = attribute.removesuffix("_bias")
    return stack, "weight" if stack == attribute else "bias"
