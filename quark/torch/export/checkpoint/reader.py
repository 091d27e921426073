"""Reading a checkpoint: from headers to a model that is ready for its tensors, then to values."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from quark.torch.export.checkpoint.computed_buffers import check_buffers, compute_buffers
from quark.torch.export.checkpoint.config_json import note_run
from quark.torch.export.checkpoint.expert_names import rename_experts, with_stored_names
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.checkpoint.header_checks import check_headers, tied_names
from quark.torch.export.checkpoint.low_rank_config import declare_low_rank
from quark.torch.export.checkpoint.parameter_types import with_usual_type
from quark.torch.export.checkpoint.placement import place_of, places_of, put_tensor, tie
from quark.torch.export.checkpoint.rotation_config import declare_rotation, rotates_keys
from quark.torch.export.checkpoint.transformers_names import rename_for_model
from quark.torch.export.checkpoint.value_checks import check_values
from quark.torch.export.formats.base import ExportFormat
from quark.torch.quantization.arguments import check_module
from quark.torch.quantization.config.algo import RotationConfig, SVDQuantConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.head_sizes import with_head_sizes
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.config.tensor_names import PARAMETERS, SHORT_NAMES
from quark.torch.quantization.nn.attention import (
    PROBABILITIES,
    attention_projections,
    check_routes,
    route_projections,
)
from quark.torch.quantization.nn.experts import split_experts, stack_experts
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.nn.packed import PackedLayer, PackedQuantizer
from quark.torch.quantization.nn.probabilities import (
    probability_modules,
    probability_quantizers,
    quantize_probabilities,
)
from quark.torch.quantization.preparation import check_plain, layer_kind, mark_as_quantized

logger = logging.getLogger(__name__)


class Reader(Protocol):
    """Source of tensors."""

    entries: dict[str, TensorHeader]

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        ...

    def tensors(self) -> Any:
        """Iterate over (name, tensor)."""
        ...


def quantized_layers(model: nn.Module, config: Config) -> dict[str, QuantizationConfig]:
    """Return the configuration of each layer that a checkpoint stores quantized.

    Raises:
        ValueError: The model is quantized already, nothing matches, or attention is quantized
            inside, but not in this architecture.
    """
    if any(isinstance(m, QuantizedLayer) for m in model.modules()):
        raise ValueError("The model is quantized already: give the float architecture.")
    operators = {n: type(m) for n, m in model.named_modules() if is_operator_module(m)}
    layers = assign(operators, config)
    if not layers:
        raise ValueError(
            f"The quantization_config matches none of the {len(operators)} layers of "
            f"{type(model).__name__}: is this the architecture that was exported?"
        )
    check_routes(model, attention_projections(layers, config))
    probability_modules(model, layers, config)
    return layers


def prepare_layers(
    model: nn.Module, fmt: ExportFormat, layers: dict[str, QuantizationConfig]
) -> None:
    """Replace layers in place by packed layers that take stored tensors."""
    probabilities = probability_modules(model, layers, fmt.config)
    for name, layer in layers.items():
        module = model.get_submodule(name)
        if is_operator_module(module):
            _prepare_layer(module, name, layer, fmt)
    projections = attention_projections(layers, fmt.config)
    route_projections(model, projections, rotates_keys(fmt.config))
    quantize_probabilities(model, probabilities, fmt.config.softmax_quant_spec)
    for name, quantizer in probability_quantizers(model):
        device = next(model.get_submodule(name).parameters()).device
        for part, tensor in _stored_probabilities(fmt.config).items():
            setattr(quantizer, part, torch.empty_like(tensor, device=device))


def _stored_probabilities(config: Config) -> dict[str, torch.Tensor]:
    """Return the stored tensors of quantized probabilities, on the meta device, by their names."""
    spec = config.softmax_quant_spec
    if spec is None or not spec.needs_data:
        return {}
    return {"scale": torch.empty((), dtype=torch.float32, device="meta")}


def _prepare_layer(
    module: nn.Module, name: str, layer: QuantizationConfig, fmt: ExportFormat
) -> nn.Module:
    packed = fmt.prepare_for_load(module, layer)
    assert isinstance(packed, PackedLayer)
    declare_rotation(packed, name, fmt.config)
    declare_low_rank(packed, name, fmt.config)
    return packed


class Loading(NamedTuple):
    """A model that is ready for the tensors of a checkpoint; only headers have been read.

    Attributes:
        model: The model, with empty packed layers.
        fmt: Format of the checkpoint.
        reader: Its tensors, under the names of the model.
        outline: The state the model will have, on the meta device.
        tied: Names of tied tensors -> names of the tensors that they are tied to.
        devices: Where parameters and buffers were.
    """

    model: nn.Module
    fmt: ExportFormat
    reader: Reader
    outline: dict[str, torch.Tensor]
    tied: dict[str, str]
    devices: dict[str, torch.device]

    def fill(self) -> nn.Module:
        """Read the tensors into the model and return it."""
        model, fmt, places = self.model, self.fmt, places_of(self.devices)
        fallback = places.get("", torch.device("cpu"))
        absent = dict(self.outline)
        for key, tensor in self.reader.tensors():
            name = fmt.state_name(key)
            expected = absent.pop(name, None)
            if expected is not None:
                value = fmt.convert_loaded(key, tensor).reshape(expected.shape)
                put_tensor(model, name, value.to(place_of(name, places, fallback)))
        for name, expected in absent.items():
            if name.endswith(".zero_point"):
                place = place_of(name, places, fallback)
                put_tensor(model, name, zero_offset(model, name, expected, place))
            elif name.endswith(".weight_groups"):
                put_tensor(model, name, None)  # in order
        check_values(model.named_modules())
        compute_buffers(model, fallback)
        tie(model, self.tied, absent)
        return model.eval()

    def stored_names(self) -> dict[str, str]:
        """Return names of tensors of the model -> names under which the reader has them."""
        keys = {self.fmt.state_name(key): key for key in self.reader.entries}
        tied = {name: keys[source] for name, source in self.tied.items() if source in keys}
        return {name: key for name, key in (tied | keys).items() if name in self.outline}

    def fill_part(self, names: Mapping[str, str | None], device: torch.device) -> None:
        """Read some tensors into the model.

        Args:
            names: Names of the outline -> names in the reader, None for what is not stored.
            device: Where to put the tensors.
        """
        for name, key in names.items():
            expected = self.outline[name]
            if key is not None:
                value = self.fmt.convert_loaded(key, self.reader.tensor(key))
                put_tensor(self.model, name, value.reshape(expected.shape).to(device))
            elif name.endswith(".zero_point"):
                put_tensor(self.model, name, zero_offset(self.model, name, expected, device))
            else:
                assert name.endswith(".weight_groups")  # in order
                put_tensor(self.model, name, None)


def prepare_load(model: nn.Module, fmt: ExportFormat, reader: Reader) -> Loading:
    """Check the headers of a checkpoint and make ``model`` ready for its tensors, in place.

    Everything is checked before the model is touched. Values of quantized layers are dropped.

    Raises:
        ValueError: Tensors are missing, unexpected, or of the wrong shape or type.
    """
    check_module(model)
    check_plain(model)
    fmt.check_readable()
    fmt.config = with_head_sizes(fmt.config, model)
    experts = split_experts(model)
    try:
        fmt.config = with_stored_names(fmt.config, model)
        reader = fmt.layer_source(reader, tied_names(model))
        named = rename_experts(rename_for_model(reader, model), model)
        layers = fmt.stored_layers(quantized_layers(model, fmt.config), named)
        stack_experts(experts, keep=layers)
        reader, outline, tied = check_stored(model, fmt, layers, reader)
        check_buffers(model)
    except BaseException:
        stack_experts(experts)
        raise
    devices = {n: p.device for n, p in [*model.named_parameters(), *model.named_buffers()]}
    prepare_layers(model, fmt, layers)
    mark_as_quantized(model, fmt.config)
    if fmt.name == "quark":
        note_run(model, fmt.config)
    return Loading(model, fmt, reader, outline, tied, devices)


def check_stored(
    model: nn.Module, fmt: ExportFormat, layers: dict[str, QuantizationConfig], reader: Reader
) -> tuple[Reader, dict[str, torch.Tensor], dict[str, str]]:
    """Check the headers of a checkpoint against a float model that will take its tensors.

    Args:
        model: The model. It is not changed.
        fmt: Format of the checkpoint.
        layers: Configuration of each layer that is stored quantized.
        reader: Tensors of the checkpoint.

    Returns:
        The reader under the names of the model, its float tensors in types that fit together; the
        state that the model will have, on the meta device; names of tied tensors -> names of the
        tensors that they are tied to.

    Raises:
        ValueError: Tensors are missing, unexpected, or of the wrong shape or type.
    """
    reader = rename_experts(rename_for_model(reader, model), model)
    reader = fmt.layer_reader(reader, model)
    outline = outline_of(model, fmt, layers)
    tied = {n: s for n, s in tied_names(model).items() if n in outline and s in outline}
    _check(model, outline, _optional(fmt, layers, tied), fmt, reader)
    return with_usual_type(reader, model, fmt, outline, layers), outline, tied


def load(model: nn.Module, fmt: ExportFormat, reader: Reader) -> nn.Module:
    """Fill ``model`` in place with the tensors of a checkpoint and return it.

    Everything is checked against the headers before the model is touched. Values it had are
    dropped, types are those of the checkpoint (``with_usual_type``). Parameters on the meta device
    are never made in float, so memory peaks at the size of the checkpoint.

    Raises:
        ValueError: Tensors are missing, unexpected, or of the wrong shape or type.
    """
    return prepare_load(model, fmt, reader).fill()


def cast_float_parameters(
    model: nn.Module, dtype: torch.dtype, float32: Collection[str] = ()
) -> nn.Module:
    """Convert the parameters that are not quantized in place; scales keep the stored type.

    Args:
        model: A model with packed layers.
        dtype: The type.
        float32: Parts of names, such as ``norm``, of modules that are in float32 in any case.
    """
    for path, module in model.named_modules():
        kind = dtype if set(float32).isdisjoint(path.split(".")) else torch.float32
        quantized: set[str] = set()
        if isinstance(module, PackedLayer):
            module.value_dtype = kind
            quantized = {name for name, _ in module.quant_config.specs()}
        for name, parameter in module.named_parameters(recurse=False):
            if name not in quantized and parameter.is_floating_point() and parameter.itemsize > 1:
                parameter.data = parameter.data.to(kind)
    return model


def _optional(
    fmt: ExportFormat, layers: dict[str, QuantizationConfig], tied: dict[str, str]
) -> set[str]:
    """Return the names of tensors that may be missing: they are known, or tied to others."""
    packed = {f"{n}.{t}" for n, layer in layers.items() for t, _ in layer.specs()}
    known = {f"{n}.{t}" for n, layer in layers.items() for t in known_offsets(layer, fmt)}
    known |= {f"{n}.weight_groups" for n in layers}
    return known | {n for n, source in tied.items() if not packed & {n, source}}


def outline_of(
    model: nn.Module, fmt: ExportFormat, layers: Mapping[str, QuantizationConfig]
) -> dict[str, torch.Tensor]:
    """Return the state that a float model will have with packed layers, on the meta device."""
    modules = dict(model.named_modules(remove_duplicate=False))
    targeted = {id(modules[name]) for name in layers}
    every_name = {name for name, module in modules.items() if id(module) in targeted}
    outline = {
        key: tensor.to("meta")
        for key, tensor in model.state_dict().items()
        if key.rpartition(".")[0] not in every_name
    }
    by_name = (RotationConfig, SVDQuantConfig)  # they name the layers that have more tensors
    is_named = any(isinstance(options, by_name) for options in fmt.config.algo_config or [])
    made: dict[Hashable, dict[str, torch.Tensor]] = {}
    for name, layer in layers.items():
        module = modules[name]
        kind = layer_kind(module, layer), name if is_named else ""
        if kind not in made:
            made[kind] = _prepare_layer(_on_meta(module), name, layer, fmt).state_dict()
        outline |= {f"{name}.{key}": tensor for key, tensor in made[kind].items()}
    for name in probability_modules(model, layers, fmt.config):
        for part, tensor in _stored_probabilities(fmt.config).items():
            outline[f"{name}.{PROBABILITIES}.{part}"] = tensor
    return outline


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a module like a given one, without values."""
    made = copy.copy(module)
    made.__dict__ = dict(module.__dict__)
    made._parameters = {
        name: None if p is None else nn.Parameter(p.detach().to("meta"), requires_grad=False)
        for name, p in module._parameters.items()
    }
    made._buffers, made._modules = dict(module._buffers), dict(module._modules)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return made


def _check(
    model: nn.Module,
    outline: dict[str, torch.Tensor],
    optional: set[str],
    fmt: ExportFormat,
    reader: Reader,
) -> None:
    """Check the headers against the state of the model."""
    stored = {n: entry for key, entry in reader.entries.items() if (n := fmt.state_name(key))}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    check_headers(
        stored, outline, optional, lambda n: _may_ignore(n, outline, ignored), type(model).__name__
    )


def known_offsets(layer: QuantizationConfig, fmt: ExportFormat) -> list[str]:
    """Zero points that may be missing: they are 0, or only needed to get codes from values."""
    has_values = fmt.options.weight_format == "fake_quantized"
    return [
        f"{SHORT_NAMES[name]}_quantizer.zero_point"
        for name, spec in layer.specs()
        if (spec.scheme.symmetric and spec.fmt.signed) or (has_values and name in PARAMETERS)
    ]


def _may_ignore(name: str, outline: dict[str, torch.Tensor], ignored: list[str]) -> bool:
    """Whether a stored tensor can be ignored.

    These are buffers that are computed, and scales that earlier versions wrote for casts.
    """
    layer = name.rsplit(".", 2)[0]
    cast = name.endswith("_quantizer.scale") and f"{layer}.weight" in outline
    return cast or name.endswith("rotary_emb.inv_freq") or any(re.search(p, name) for p in ignored)


def zero_offset(
    model: nn.Module, name: str, expected: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """Return the zero point that is not stored, or None where it is not known."""
    quantizer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(quantizer, PackedQuantizer)
    if not (quantizer.scheme.symmetric and quantizer.scheme.fmt.signed):
        return None
    return torch.zeros(expected.shape, dtype=expected.dtype, device=device)
