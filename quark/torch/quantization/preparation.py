"""Preparation of a model: select the layers to quantize, and replace them in reversible steps."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from quark.torch.graph.quantized_mark import set_mark
from quark.torch.graph.residency import residency_of
from quark.torch.numerics.finite import check_finite, find_infinite
from quark.torch.quantization.config.compatibility import check_compatibility, warn_about_ignored
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.linear_classes import operator_class
from quark.torch.quantization.config.match import assign, report_unmatched
from quark.torch.quantization.config.name_lookup import names_as_subject
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import (
    QuantizedLayer,
    check_channel_axis,
    input_axis,
    is_linear,
)
from quark.torch.quantization.nn.operators import (
    has_empty_weight,
    is_operator,
    is_operator_module,
    operator,
    operator_names,
)

logger = logging.getLogger(__name__)


def check_plain(model: nn.Module) -> None:
    """Check that a model is not wrapped: its modules would go by other names in a checkpoint.

    Raises:
        TypeError: It is compiled, parallel, or has adapters of PEFT. The message has the way to go.
    """
    kind = type(model).__name__
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise TypeError(
            f"The model is compiled ({kind}): give model._orig_mod, and call torch.compile on the "
            "quantized model."
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError(
            f"model.compile() was called on this {kind}: give a model that is not compiled, and "
            "compile the quantized model."
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"The model is wrapped in {kind}: give model.module.")
    adapted = [name for name, module in model.named_modules() if _is_of_peft(module)]
    if adapted:
        where = f" at {adapted[0]}" if adapted[0] else ""
        raise TypeError(
            f"The model has adapters of PEFT{where}: merge them first with "
            + ("model = model.merge_and_unload()." if not adapted[0] else _MERGE)
        )


_MERGE = "peft.PeftModel.merge_and_unload, or load the model without them."


def _is_of_peft(module: nn.Module) -> bool:
    """Whether a module is one of the package peft, which is not imported for that."""
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def refuse_to_save(*args: Any, **options: Any) -> None:
    """Take the place of ``save_pretrained`` of a quantized model, which would not write its scales.

    Raises:
        ValueError: Always; the message has the way to go.
    """
    raise ValueError(
        "save_pretrained cannot write a quantized model: call quark.torch.export_safetensors("
        "model, directory, tokenizer=tokenizer) after ModelQuantizer.freeze, and load the "
        "directory with from_pretrained."
    )


def save_in_training(model: Any, save_directory: Any, **options: Any) -> None:
    """Take the place of ``save_pretrained`` of a quantized model: write a checkpoint of training.

    It holds the ``state_dict`` under its own names: float weights, scales and state of the ranges.
    ``load_state_dict`` of a model that is quantized alike reads it, as ``Trainer`` does to resume.

    Raises:
        ValueError: The model does not train; see ``refuse_to_save``.
    """
    if not is_training(model):
        refuse_to_save()
    type(model).save_pretrained(model, save_directory, **{**options, "save_original_format": False})


def is_training(model: nn.Module) -> bool:
    """Whether a quantized model has begun to train, and is not frozen."""
    layers = [layer for _, layer in quantized_layers(model) if not layer.frozen]
    quantizers = [q for layer in layers for q in layer.quantizers().values()]
    return any(q.is_following or q.has_updates for q in quantizers)


def mark_as_quantized(model: nn.Module, config: Config, given: Config | None = None) -> None:
    """Let a model remember its configuration, and refuse to be saved as if it were in float.

    Layers that are frozen already, by an algorithm, end their training.

    Args:
        model: The quantized model.
        config: Its configuration, with the names of its modules.
        given: The configuration before names were resolved, if there was another.
    """
    holder: Any = model
    holder.quant_config = config
    holder._given_config = deepcopy(given)
    set_mark(model)
    if hasattr(model, "save_pretrained"):
        holder.save_pretrained = partial(save_in_training, model)
    for _, layer in quantized_layers(model):
        if layer.frozen:
            layer.end_training()


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, FakeQuantizedLayer]]:
    """Iterate over (name, module) of the quantized modules of a model, each once."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizedLayer):
            yield name, module


def select_layers(
    model: nn.Module, config: Config, warns: bool = True
) -> dict[str, QuantizationConfig]:
    """Return the configuration of each module that will be quantized. The model is not changed.

    Args:
        model: A float model.
        config: How to quantize it.
        warns: Whether to warn about patterns without modules, ignored options and float modules.

    Raises:
        ValueError: The model is quantized already, no module can be quantized or is selected, or a
            configuration does not fit a module.
    """
    check_compatibility(config)
    if warns:
        warn_about_ignored(config)
    modules = dict(model.named_modules())
    names = {name: type(module) for name, module in modules.items()}
    for name, kind in names.items():
        if issubclass(kind, QuantizedLayer):
            raise ValueError(
                f"{name} is quantized already: load the float model again, or a checkpoint with "
                "import_model_from_safetensors(None, directory, dequantize=True)."
            )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "Transformers loaded this model quantized: load its directory with "
            "import_model_from_safetensors(None, directory, dequantize=True)."
        )
    _check_layer_types(names, config)
    candidates = {name: type(m) for name, m in modules.items() if is_operator_module(m)}
    supported = operator_names()
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no module that can be quantized (supported: {supported})."
        )
    if warns:
        report_unmatched(list(names), config)
    if not (layers := assign(candidates, config)):
        raise ValueError(
            f"The configuration quantizes none of the {len(candidates)} modules of the model that "
            f"can be ({supported}): set global_quant_config, or check exclude and the patterns"
            + _describe_other_products(names.values())
        )
    checked: set[Hashable] = set()
    for name, layer in layers.items():
        module = modules[name]
        if (key := layer_kind(module, layer)) in checked:
            continue
        checked.add(key)
        check_fit(name, module, layer)
        if residency_of(model) is not None and any(s.range_training for _, s in layer.specs()):
            raise ValueError(
                f"{name}: trained scales (qat_spec, LSQObserver, TQTObserver) need a model in "
                "memory, and this one is read part by part. Leave them out, or load the model."
            )
    if warns:
        _warn_of_float_modules(model)
    return layers


def _describe_other_products(kinds: Iterable[type[nn.Module]]) -> str:
    """Return the end of a message: a full stop, and the subclasses of Linear that stay in float."""
    classes = {kind for kind in kinds if issubclass(kind, nn.Linear) and not is_operator(kind)}
    if not classes:
        return "."
    return (
        f". Modules of {', '.join(sorted(kind.__name__ for kind in classes))} stay in float: the "
        "forward of such a subclass of Linear was not seen to give the product of Linear."
    )


def layer_kind(module: nn.Module, layer: QuantizationConfig) -> Hashable:
    """Return a key that modules share which differ in nothing but names and values.

    It is valid as long as the configuration exists: equal ones may have several keys.
    """
    tensors = [getattr(module, name, None) for name in PARAMETERS]
    parameters = [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
    return type(module), id(layer), *parameters


def replace_layers(model: nn.Module, layers: Mapping[str, QuantizationConfig]) -> None:
    """Replace the named modules by quantized ones, in place.

    A module with several names is replaced once, under all of them.
    """
    for name, layer in layers.items():
        module = model.get_submodule(name)
        operator(type(module)).quantized.from_float(module, layer)


def restore_layers(model: nn.Module) -> None:
    """Undo ``replace_layers``. No layer may be frozen."""
    for _, layer in list(quantized_layers(model)):
        layer.to_float()


def _warn_of_unfit_operators(model: nn.Module) -> None:
    """Warn about operators that are left in float; see ``is_operator_module``."""
    operators = {n: m for n, m in model.named_modules() if is_operator(type(m))}
    empty = [name for name, module in operators.items() if has_empty_weight(module)]
    if empty:
        logger.warning("%s left in float: the weight has no elements.", names_as_subject(empty))
    left = [n for n, m in operators.items() if n not in empty and not is_operator_module(m)]
    if left:
        logger.warning(
            "%s left in float: a hook computes the weight before each pass. To quantize it, make "
            "it a parameter: torch.nn.utils.remove_weight_norm, remove_spectral_norm, or "
            "prune.remove.",
            names_as_subject(left),
        )


def _warn_of_float_modules(model: nn.Module) -> None:
    """Warn about modules that cannot be quantized, if they hold more than 5 % of the parameters.

    Of operators that cannot be quantized, whatever they hold.
    """
    _warn_of_unfit_operators(model)
    sizes: dict[str, int] = {}
    counted = {
        id(p) for m in model.modules() if is_operator_module(m) for p in m._parameters.values()
    }
    for name, module in model.named_modules():
        own = {id(p): p for p in module._parameters.values() if p is not None and p.dim() > 1}
        large = [p.numel() for key, p in own.items() if key not in counted]  # tied ones once
        counted |= own.keys()
        if large:
            sizes[name] = sum(large)
    total = sum(p.numel() for p in model.parameters())
    if sum(sizes.values()) > total // 20:
        worst = max(sizes, key=lambda n: sizes[n])
        logger.warning(
            "%.0f %% of the parameters stay in float: %d modules such as %s (%s) cannot be "
            "quantized by this version.",
            100 * sum(sizes.values()) / total,
            len(sizes),
            worst,
            type(model.get_submodule(worst)).__name__,
        )


def _check_layer_types(names: dict[str, type[nn.Module]], config: Config) -> None:
    for kind in config.layer_type_quant_config:
        if kind not in names.values():
            continue
        if (used := operator_class(kind)) is not kind:
            raise ValueError(
                f"layer_type_quant_config: {kind.__name__} is quantized as {used.__name__}: give "
                f"nn.{used.__name__} in its place."
            )
        if not is_operator(kind):
            raise ValueError(
                f"layer_type_quant_config: {kind.__name__} cannot be quantized "
                f"(supported: {operator_names()})."
            )


def check_parameters(model: nn.Module) -> None:
    """Raise if a parameter of a model has NaN or infinite values.

    Those of a model larger than memory are checked when they are read first.

    Raises:
        ValueError: The message names the parameter.
    """
    if residency_of(model) is not None:
        return
    parameters = {n: p for n, p in model.named_parameters() if not p.is_meta}
    name = find_infinite(parameters)
    if name is not None:
        check_finite(name, parameters[name])


def check_fit(name: str, module: nn.Module, layer: QuantizationConfig) -> None:
    """Raise if the configuration of a module does not fit it.

    Raises:
        ValueError: The message names the tensor.
    """
    if layer.input_tensors is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"{name}.input_tensors: the inputs of a {type(module).__name__} are indices and cannot "
            "be quantized: leave input_tensors out of its configuration."
        )
    _check_heads(name, module, layer)
    for tensor, spec in layer.specs():
        if tensor not in PARAMETERS:
            check_channel_axis(f"{name}.{tensor}", spec)
        value = getattr(module, tensor, None) if tensor in PARAMETERS else None
        if value is None:
            continue
        if value.is_meta:
            raise ValueError(
                f"{name}.{tensor} is on the meta device and has no values: load the weights first "
                "(a model offloaded by accelerate must be moved to memory)."
            )
        if not value.is_floating_point():
            raise ValueError(f"{name}.{tensor} is {value.dtype}; only floats can be quantized.")
        try:
            undivided = find_undivided_axis(spec, type(module), value.shape)
        except ValueError as error:
            raise ValueError(f"{name}.{tensor}: {error}") from None
        if undivided is not None:
            axis, size = undivided
            fits = [str(g) for g in (256, 128, 64, 32, 16, 8) if size % g == 0] or [str(size)]
            raise ValueError(
                f"{name}.{tensor}: group_size={spec.group_size} does not divide its {size} "
                f"elements along axis {axis}. Choose one that does ({', '.join(fits)}), or "
                f"add '*{name.rpartition('.')[2]}' to exclude (--exclude_layers)."
            )


def _check_heads(name: str, module: nn.Module, layer: QuantizationConfig) -> None:
    """Raise if outputs with a scale per head have no whole heads.

    Raises:
        ValueError: The channels of a head are not known, or do not divide the outputs.
    """
    spec = layer.output_tensors
    if spec is None or spec.qscheme is not QSchemeType.per_head:
        return
    if not is_linear(type(module)):
        raise ValueError(
            f"{name}.output_tensors: the outputs of a {type(module).__name__} have no heads. Only "
            "linear layers take scales per head."
        )
    width = module.weight.shape[1 - input_axis(type(module))]  # type: ignore[index]  # a tensor
    if spec.group_size is None or width % spec.group_size:
        raise ValueError(
            f"{name}.output_tensors: heads of {spec.group_size} channels do not divide its {width} "
            "outputs. Give the channels of a head as group_size."
        )


def find_undivided_axis(
    spec: QuantizationSpec, kind: type[nn.Module], shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the axis of a parameter that groups with zero points do not divide, and its size.

    None if there is no such axis.

    Args:
        spec: How the parameter is quantized.
        kind: Type of its layer.
        shape: Its shape.

    Raises:
        ValueError: The specification does not fit the shape.
    """
    used = spec.for_parameter(input_axis(kind) == 0)
    blocks = used.coded.scheme.blocks(shape)
    if blocks.padded == blocks.shape or not used.scheme.has_zero_point:
        return None
    axis = (used.ch_axis or 0) % len(blocks.shape)
    return axis, blocks.shape[axis]
