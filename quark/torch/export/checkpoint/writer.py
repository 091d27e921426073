"""Writing a checkpoint: the tensors and the configuration of a quantized model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from quark import __version__
from quark.torch.export.checkpoint.config_json import ALGORITHMS, notes_of, write_settings_file
from quark.torch.export.checkpoint.described_config import described_config
from quark.torch.export.checkpoint.graphs import (
    GRAPH,
    edge_tensors,
    graph_section,
    is_quantized_graph,
    layers_config,
)
from quark.torch.export.checkpoint.low_rank_config import with_low_rank
from quark.torch.export.checkpoint.rotation_config import with_rotations
from quark.torch.export.checkpoint.transformers_names import saved_names
from quark.torch.export.checks import check_configured, check_float
from quark.torch.export.expert_tokens import report_experts
from quark.torch.export.formats.base import ExportFormat, format_class, get_format
from quark.torch.export.formats.registry import FORMATS
from quark.torch.quantization.calibration import group_by_parent, merged_scale
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import config_for, without_order
from quark.torch.quantization.graph_mode.edges import EDGES
from quark.torch.quantization.nn.attention import PROBABILITIES, key_routes
from quark.torch.quantization.nn.experts import is_stacked
from quark.torch.quantization.nn.layer import QuantizedLayer, float_class
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.nn.probabilities import probability_quantizers

logger = logging.getLogger(__name__)

Scales = dict[str, dict[str, torch.Tensor]]  # layer -> tensor of the configuration -> scale


def check_exportable(model: nn.Module) -> None:
    """Check that a model is quantized and frozen.

    Raises:
        ValueError: It is not quantized or not frozen.
    """
    if not any(isinstance(m, QuantizedLayer) for m in model.modules()):
        raise ValueError(
            "The model has no quantized module: call ModelQuantizer.quantize_model and freeze "
            "before an export."
        )
    unfrozen = [
        n for n, m in model.named_modules() if isinstance(m, QuantizedLayer) and not m.frozen
    ]
    if unfrozen:
        raise ValueError(
            f"{unfrozen[0]} and {len(unfrozen) - 1} more modules are not frozen: "
            "call ModelQuantizer.freeze(model) before an export."
        )


def check_present(model: nn.Module) -> None:
    """Check that a model has values, which tensors on the meta device have not.

    Raises:
        ValueError: Tensors are on the meta device.
    """
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if absent:
        raise ValueError(
            f"{absent[0]} and {len(absent) - 1} more tensors are on the meta device and have no "
            "values: move the model to memory before an export (accelerate may have offloaded it)."
        )


def make_format(
    model: nn.Module, config: Config | None, options: JsonExporterConfig, mode: str
) -> ExportFormat:
    """Return the format that writes ``model``, with a configuration that no order of rules changes.

    Raises:
        ValueError: The model is not quantized, no configuration is given or remembered, the given
            one does not describe the model, or the format is unknown or cannot hold it.
    """
    check_exportable(model)
    if is_quantized_graph(model):
        return _graph_format(model, options, mode)
    config = described_config(model, config)
    options = _completed(options, config)
    names = {n: float_class(m) for n, m in model.named_modules() if n}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    rotations = {n: m.input_rotation for n, m in layers.items() if m.input_rotation is not None}
    routes = key_routes(model)
    has_keys = any(route.rotates for route in routes)
    if has_keys and not format_class(mode).stores_rotated_keys:
        able = [name for name in FORMATS if format_class(name).stores_rotated_keys]
        raise ValueError(
            f"custom_mode={mode!r} cannot tell that keys are rotated before they are quantized: "
            f"quantize without r3, or use custom_mode={able[0]!r}."
        )
    softmax = next((quantizer.spec for _, quantizer in probability_quantizers(model)), None)
    if softmax is not None and not format_class(mode).stores_probabilities:
        raise ValueError(
            f"custom_mode={mode!r} cannot tell that probabilities of attention are quantized: "
            "quantize without attention_scheme and softmax_quant_spec, or use custom_mode='quark'."
        )
    config = replace(config, version=__version__, kv_cache_post_rope=bool(routes))
    config = replace(config, softmax_quant_spec=softmax)
    prescaled = [n for n, m in layers.items() if m.input_prescale is not None]
    ranks = {n: len(m.low_rank_down) for n, m in layers.items() if m.low_rank_down is not None}
    config = with_low_rank(with_rotations(config, rotations, has_keys, prescaled, ranks), ranks)
    config = without_order(names, config)
    fmt = get_format(mode, _naming_all(model, config), options)
    saved = dict(zip(saved_names(model, layers), layers.values(), strict=True))
    fmt.check_model(model)
    fmt.check_writable({**layers, **saved}, _left(model))
    return fmt


def _graph_format(model: nn.Module, options: JsonExporterConfig, mode: str) -> ExportFormat:
    """Return the format of the layers of a graph.

    Raises:
        ValueError: The format is that of other software, which reads no graphs.
    """
    if mode != "quark":
        raise ValueError(
            f"custom_mode={mode!r} has no place for graphs. Leave it out, or use "
            "save_params(…, quant_mode=QuantizationMode.fx_graph_mode), export_onnx or "
            "export_program."
        )
    assert isinstance(model, fx.GraphModule)
    graph_section(model)  # raises before anything is written
    fmt = get_format(mode, layers_config(model), options)
    fmt.check_writable(
        {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}, []
    )
    return fmt


def _completed(options: JsonExporterConfig, config: Config) -> JsonExporterConfig:
    """Return options completed with those of the model, or of the export it was read from."""
    before = config.export or JsonExporterConfig()
    group = options.kv_cache_group or config.kv_cache_group or before.kv_cache_group
    return replace(
        options,
        weight_merge_groups=options.weight_merge_groups or before.weight_merge_groups,
        kv_cache_group=list(group or config.kv_cache_patterns),
        min_kv_scale=max(options.min_kv_scale, config.min_kv_scale, before.min_kv_scale),
    )


def _left(model: nn.Module) -> list[str]:
    """Return the names of float modules that other software may take for linear layers."""
    known = (QuantizedLayer, nn.Embedding)
    modules = {n: m for n, m in model.named_modules() if not isinstance(m, known)}
    weights = {n: m._parameters.get("weight") for n, m in modules.items()}
    matrices = {n for n, weight in weights.items() if weight is not None and weight.dim() == 2}
    names = [n for n, m in modules.items() if n in matrices or is_stacked(m)]
    return list(dict.fromkeys([*names, *saved_names(model, names)]))


def _naming_all(model: nn.Module, config: Config) -> Config:
    """Return a configuration that excludes float layers by the names that other software uses.

    Some layers are linear in other software but not here, such as routers of experts, or stacked
    experts. Some have another name in the checkpoint.
    """
    exclude = list(config.exclude)
    for name, module in model.named_modules():
        if is_stacked(module):
            exclude += [name, f"{name}.*"]
        weight = module._parameters.get("weight")
        own = weight is not None and weight.dim() == 2 and not isinstance(module, QuantizedLayer)
        if own and not is_operator_module(module) and config_for(name, type(module), config):
            exclude.append(name)
    return replace(config, exclude=list(dict.fromkeys([*exclude, *saved_names(model, exclude)])))


def collect(model: nn.Module, fmt: ExportFormat) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by their stored names.

    The model is not changed. Tied tensors appear once.

    Raises:
        ValueError: The model has no values, or such as no reader can make sense of.
    """
    check_present(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    scales = merged_scales(layers, fmt.options)
    state, parameters = float_state(model), dict(model.named_parameters())
    if is_quantized_graph(model):  # a trained range is a parameter; its scale is written
        state = {name: t for name, t in state.items() if not name.startswith(f"{EDGES}.")}
        state |= edge_tensors(model)
    check_configured(model, fmt.config, layers)
    check_float({name: tensor for name, tensor in state.items() if name in parameters})
    report_experts(model)
    for name, layer in layers.items():
        for part, tensor in layer_parts(name, layer, fmt, scales.get(name, {})).items():
            state[fmt.stored_name(f"{name}.{part}")] = tensor
    return original_names(model, fmt.join(untie(model, state)))


def float_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that belong to no quantized layer, by their names in it."""
    every_name = {
        n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QuantizedLayer)
    }
    inside = {f"{name}.{PROBABILITIES}" for name, _ in probability_quantizers(model)}
    # A quantized layer holds tensors itself and in its quantizers.
    return {
        key.replace("_quantizer.", "_") if key.rpartition(".")[0] in inside else key: tensor
        for key, tensor in model.state_dict().items()
        if not {key.rsplit(".", 1)[0], key.rsplit(".", 2)[0]} & every_name
    }


def layer_parts(
    name: str, layer: QuantizedLayer, fmt: ExportFormat, scales: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a quantized layer by their names relative to it.

    Args:
        name: Name of the layer, for messages.
        layer: The layer, frozen.
        fmt: Format of the checkpoint.
        scales: Scales that replace the layer's own; see ``merged_scales``.

    Raises:
        ValueError: No reader can make sense of a value.
    """
    try:
        return fmt.layer_tensors(layer, scales)
    except ValueError as error:
        raise ValueError(f"{name} cannot be written: {error}") from None


def merged_scales(layers: Mapping[str, Any], options: JsonExporterConfig) -> Scales:
    """Return the scales that the options of the export change, and warn about them."""
    scales: Scales = {}
    wanted = [(group, "weight", 0.0) for group in options.weight_merge_groups or []]
    wanted.append((options.kv_cache_group, "output_tensors", options.min_kv_scale))
    for group, tensor, floor in wanted:
        for members in group_by_parent(layers, group):
            states = [layers[name].quantized_tensor(tensor) for name in members]
            scale = merged_scale(states)
            if scale is None:
                continue
            scale = scale.clamp(min=floor)
            for name, state in zip(members, states, strict=True):
                if not torch.equal(state.scale, scale.to(state.scale.device)):
                    # A copy each: a tensor that goes by two names is stored once.
                    scales.setdefault(name, {})[tensor] = scale.to(state.scale.device, copy=True)
    if scales:
        logger.warning(
            "Scales of %d layers are merged by the export, so the checkpoint differs slightly from "
            "the model in memory. Set kv_cache_group or shared_scale_groups in the Config to merge "
            "them during quantization.",
            len(scales),
        )
    return scales


def untie(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep one name of each tensor that has several.

    Where a quantized tensor unties its name, ``config.json`` says that no name is tied: then all
    tied names keep a tensor each, except those of one module.
    """
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if _has_untied(model):
        apart = [n for n, s in tied.items() if _owner(model, n) is not _owner(model, s)]
        state = state | {name: state[name].clone() for name in apart if name in state}
    secondary = set(tied)
    owners: dict[tuple[Any, ...], str] = {}
    for name in sorted(state, key=lambda n: n in secondary):
        if state[name].numel():
            owners.setdefault(_place(state[name]), name)
    kept = set(owners.values()) | {n for n, t in state.items() if not t.numel()}
    return {name: tensor for name, tensor in state.items() if name in kept}


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that holds a tensor."""
    return model.get_submodule(name.rpartition(".")[0])


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share only if they are the same values in memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def original_names(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo the renaming and fusing of Transformers when it loads some architectures."""
    if not hasattr(model, "save_pretrained"):
        return state
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return reverted


def write_model_files(
    model: nn.Module, section: dict[str, Any], directory: Path, tokenizer: Any | None
) -> None:
    """Write config.json, the generation configuration and the tokenizer.

    Notes of the calibration are in config.json too, such as the digest of its data.
    """
    from quark.torch.files import write_json

    config: Any = getattr(model, "config", None)
    notes = notes_of(model)
    if section.get("quant_method") == "quark":  # its section has the algorithms with their options
        notes.pop(ALGORITHMS, None)
    if isinstance(config, Mapping):
        write_json(directory / "config.json", {**config, "quantization_config": section})
    elif not hasattr(config, "save_pretrained"):
        architectures = [type(model).__name__]
        write_json(
            directory / "config.json",
            {"architectures": architectures, "quantization_config": section}
            | notes
            | ({GRAPH: graph_section(model)} if is_quantized_graph(model) else {}),  # type: ignore[arg-type]
        )
    else:
        written = copy.deepcopy(config)
        written.quantization_config = section
        for name, value in notes.items():
            setattr(written, name, value)
        written.architectures = [type(model).__name__]
        written.dtype = _float_type(model) or written.dtype
        if _has_untied(model):
            written.tie_word_embeddings = False
        written.save_pretrained(directory)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    write_settings_file(section, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _has_untied(model: nn.Module) -> bool:
    """Whether tensors that the architecture ties differ, for instance if one is quantized."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    return any(_place(state[name]) != _place(state[source]) for name, source in tied.items())


def _float_type(model: nn.Module) -> torch.dtype | None:
    """Return the type of the first parameter that holds values, not codes."""
    types = (p.dtype for p in model.parameters())
    return next((t for t in types if t.is_floating_point and t.itemsize > 1), None)
