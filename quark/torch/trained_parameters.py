"""The parameters of a quantized model that train while its codes stay.

They are scales, zero points in floats, the parameters of norms, and the biases of quantized layers.

A weight is linear in its scales once the codes are fixed, so a scale s trains as the ratio
r = s' / s: the weight is W r. Where zero points z are floats, it is W r - (z' - z) s'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import Part, iterate_parts
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.stages import per_value
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor, TensorQuantizer
from quark.torch.quantization.preparation import quantized_layers


class TrainedParameters:
    """The parameters that train, and the tensors of the model that they stand for.

    Attributes:
        parameters: Ratios of scales by the name of the layer, and zero points, norms and biases by
            the name of the tensor; float32.
    """

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "quant_config", None)
        shares = isinstance(config, Config) and bool(config.shared_scale_groups)
        self._layers = {
            name: layer
            for name, layer in quantized_layers(model)
            if (q := layer.weight_quantizer) is not None and _part_of(q, shares) is not None
        }
        self._parts = {n: str(_part_of(_quantizer(x), shares)) for n, x in self._layers.items()}
        self._norms = dict(_norm_parameters(model))
        self._biases = dict(_bias_parameters(model))
        self._vectors = self._norms | self._biases
        self._model, made = model, dict[str, torch.Tensor]()
        self._scales, self._zeros = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for part in iterate_parts(model):
            layers = self._layers_in(part)
            scales = {n: self._scale(n).detach().clone() for n in layers}
            zeros = {
                n: z.detach().float()
                for n, x in layers.items()
                if (z := _zero_point(x)) is not None
            }
            made |= {n: torch.ones_like(s, dtype=torch.float32) for n, s in scales.items()}
            made |= {f"{n}.zero_point": z.clone() for n, z in zeros.items()}
            made |= {n: p.detach().float().clone() for n, p in self._vectors_in(part).items()}
            self._scales |= scales
            self._zeros |= zeros
        self.parameters = {n: value.requires_grad_() for n, value in made.items()}

    def _layers_in(self, part: Part) -> dict[str, FakeQuantizedLayer]:
        """Return the layers of a part whose scales train, by name."""
        return {name: layer for name, layer in self._layers.items() if part.holds(name)}

    def _vectors_in(self, part: Part) -> dict[str, nn.Parameter]:
        """Return the norms and biases of a part, by name."""
        return {n: p for n, p in self._vectors.items() if part.holds(n.rpartition(".")[0])}

    def _scale(self, name: str) -> torch.Tensor:
        scale: torch.Tensor = getattr(_quantizer(self._layers[name]), self._parts[name])
        return scale

    def values(self, part: Part) -> dict[str, torch.Tensor]:
        """Return the tensors of a part that follow from the parameters, by their names in it.

        Args:
            part: A part of the model, which is in memory.
        """
        layers, vectors = self._layers_in(part), self._vectors_in(part)
        values = {f"{name}.weight": self._weight(name, layer) for name, layer in layers.items()}
        values |= {name: self.parameters[name].to(p.dtype) for name, p in vectors.items()}
        prefix = f"{part.name}." if part.name else ""
        return {name.removeprefix(prefix): value for name, value in values.items()}

    def _weight(self, name: str, layer: FakeQuantizedLayer) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._state(name).value(layer.weight.dtype)
        weight, scheme = layer.weight.detach(), _quantizer(layer).scheme
        ratio, old = self.parameters[name], self._scales[name].float()
        rounded = self._new_scale(name).float() / old
        ratio = ratio + (rounded - ratio).detach()  # straight-through gradient
        values: torch.Tensor = weight.float() * per_value(ratio, scheme, weight.shape)
        if name in self._zeros:
            moved = self.parameters[f"{name}.zero_point"] - self._zeros[name]
            values = values - per_value(moved * ratio * old, scheme, weight.shape)
        return values.to(weight.dtype)

    def _state(self, name: str) -> QuantizedTensor:
        """Return codes and new scales of a weight."""
        layer, new = self._layers[name], self._new_scale(name)
        state = layer.quantized_tensor("weight")
        assert state is not None and state.scale is not None
        if name in self._zeros:
            zero_point = self.parameters[f"{name}.zero_point"].detach().clone()
            return state._replace(scale=new, zero_point=zero_point)
        if self._parts[name] == "scale":
            return state._replace(scale=new)
        # Block scales are relative to the tensor scale.
        blocks = state.scale * (new / self._scales[name])
        blocks = round_scale(blocks, state.scheme.scale, new)
        return state._replace(scale=blocks, scale_2=new)

    @torch.no_grad()
    def _new_scale(self, name: str) -> torch.Tensor:
        old = self._scales[name]
        scale = self.parameters[name] * old.float()
        if self._parts[name] == "scale_2":
            return scale
        return round_scale(scale, _quantizer(self._layers[name]).scheme.scale, signs=old)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace scales, zero points, weights, norms and biases of the model. Codes stay."""
        for part in iterate_parts(self._model):
            for name, layer in self._layers_in(part).items():
                state, quantizer = self._state(name), _quantizer(layer)
                write_(layer.weight, state.value(layer.weight.dtype))
                quantizer.scale, quantizer.scale_2 = state.scale, state.scale_2
                quantizer.zero_point = state.zero_point
            for name, parameter in self._vectors_in(part).items():
                write_(parameter, self.parameters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters."""
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to a copy of them."""
        for name, value in self.parameters.items():
            value.copy_(state[name])

    def count_scales(self) -> int:
        """Return the number of scales that train."""
        return sum(scale.numel() for scale in self._scales.values())

    def count_zero_points(self) -> int:
        """Return the number of zero points that train."""
        return sum(zeros.numel() for zeros in self._zeros.values())

    def count_norms(self) -> int:
        """Return the number of parameters of norms."""
        return sum(parameter.numel() for parameter in self._norms.values())

    def count_biases(self) -> int:
        """Return the number of biases of quantized layers."""
        return sum(parameter.numel() for parameter in self._biases.values())


def count_trained(model: nn.Module, layers: Mapping[str, QuantizationConfig]) -> int:
    """Return how many values train once a model is quantized, at most.

    Args:
        model: The float model; its parameters need no values.
        layers: How each of its layers will be quantized, by name.
    """
    count = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    for name, layer in layers.items():
        if layer.weight is None:
            continue
        scheme, weight = layer.weight.for_parameter().scheme, model.get_parameter(f"{name}.weight")
        shape: Sequence[int] = scheme.scale_shape(weight.shape)
        each = 1 + scheme.float_zero_point
        count += each * math.prod(shape) if _is_free(scheme) else 1
    return count


def _quantizer(layer: FakeQuantizedLayer) -> TensorQuantizer:
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    return quantizer


def _part_of(quantizer: TensorQuantizer, shares: bool) -> str | None:
    """Return the scale of a weight that may train: ``scale`` or ``scale_2``; None if none may.

    Args:
        quantizer: The quantizer of the weight.
        shares: Whether layers share scales of whole weights.
    """
    part = "scale_2" if quantizer.scheme.scale.two_level else "scale"
    scale = getattr(quantizer, part)
    if scale is None or (part == "scale" and not _is_free(quantizer.scheme)):
        return None
    return None if shares and scale.numel() == 1 else part


def _zero_point(layer: FakeQuantizedLayer) -> torch.Tensor | None:
    """Return the zero points of a weight if they may take any value."""
    quantizer = _quantizer(layer)
    is_float = quantizer.scheme.float_zero_point and not quantizer.spec.quantizes_codes
    return quantizer.zero_point if is_float else None


def _is_free(scheme: Scheme) -> bool:
    """Whether scales may take any value of a wide float type."""
    scale = scheme.scale
    is_wide = scale.fmt is None and not scale.span and not scale.power_of_two
    return scheme.fmt.scaled and is_wide and not scheme.shares_exponents


def _norm_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the float vectors of norms: parameters of modules whose class is a norm."""
    for path, module in model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point() and parameter.dim() == 1:
                yield name, parameter


def _bias_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the biases of quantized layers that are not quantized themselves."""
    for path, layer in quantized_layers(model):
        bias = getattr(layer, "bias", None)
        if isinstance(bias, nn.Parameter) and "bias" not in layer.parameter_quantizers():
            yield f"{path}.bias", bias
