"""Quantization from files to files: tensor by tensor, without a model in memory.

It serves everything that weights alone decide: no calibration data, no algorithm. The model is
built without values, so that names, parts and tied weights are those of Transformers, and every
step is that of a model in memory. The files are the same, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quark.torch.export.checkpoint.computed_buffers import compute_buffers
from quark.torch.export.checkpoint.config_json import SECTION, note_run, read_config_json
from quark.torch.export.checkpoint.dequantized import DequantizedReader
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.float_model import report_unused
from quark.torch.export.checkpoint.float_source import (
    FloatSource,
    fill_with_placeholders,
    placeholder,
)
from quark.torch.export.checkpoint.prequantized import (
    PrequantizedLayers,
    declare_kept,
    without_shared,
)
from quark.torch.export.checkpoint.reader import Reader
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.export.checkpoint.stored_model import is_known, stored_model
from quark.torch.export.checkpoint.writer import (
    float_state,
    make_format,
    untie,
    write_model_files,
)
from quark.torch.export.checks import check_written
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.file_work import FileWork
from quark.torch.export.recognition import open_in_float, reading
from quark.torch.files import check_vacant, fresh_directory, size_of
from quark.torch.quantization.calibration import needs_data
from quark.torch.quantization.checks import check_steady, with_shared_inputs
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.resolution import resolve_names, shares_inputs
from quark.torch.quantization.config.type import QuantFlow
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.direct_reads import leave_unpassed_in_float
from quark.torch.quantization.dry_run import zero_products
from quark.torch.quantization.nn.experts import split_experts, stack_experts
from quark.torch.quantization.nn.layer import is_linear
from quark.torch.quantization.preparation import (
    mark_as_quantized,
    quantized_layers,
    replace_layers,
    select_layers,
)


def check_file_to_file(config: Config) -> None:
    """Check that weights alone decide how a configuration quantizes.

    Raises:
        ValueError: It has algorithms, static activations or keys after rotary embedding, which a
            model in memory and mostly data decide.
    """
    if problem := needs_model(config):
        raise ValueError(
            f"Files cannot be quantized without a model in memory: {problem}. Load the model and "
            "call ModelQuantizer.quantize_model, or choose a scheme of weights alone or with "
            "dynamic activations."
        )


def needs_model(config: Config) -> str:
    """Return why a configuration needs a model in memory, "" if weights alone decide."""
    layers = [config.global_quant_config, *config.layer_type_quant_config.values()]
    for by_name in (
        config.layer_quant_config,
        config.kv_cache_quant_config,
        config.query_quant_config,
    ):
        layers += by_name.values()
    if config.algo_config:
        return f"{config.algo_config[0].name} runs the model"
    if needs_data(layers):
        return "static activation scales are calibrated on data"
    if config.softmax_quant_spec is not None:
        return "softmax_quant_spec changes how the model runs"
    if config.query_quant_config:
        return "query_quant_config changes how the model runs"
    if config.kv_cache_post_rope and config.kv_cache_quant_config:
        return "kv_cache_post_rope changes how the model runs"
    return ""


def quantize_files(
    config: Config,
    source: Path,
    target: Path,
    settings: ExportSettings,
    overwrite: bool = False,
    keeps_types: bool = False,
    trust_remote_code: bool = False,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
) -> nn.Module:
    """Quantize a directory of safetensors to another directory.

    Args:
        config: How to quantize.
        source: Directory of a model, float or quantized: that is dequantized tensor by tensor.
        target: Directory to write. It is written beside and renamed when complete.
        settings: Settings of the export.
        overwrite: Whether an earlier output may be replaced.
        keeps_types: Whether tensors that are not quantized keep the types of the source; by
            default they take the type in its ``config.json``, as a model in memory does.
        trust_remote_code: Whether Python code of the source may run.
        devices: Devices that quantize, in turn.

    Returns:
        The quantized model without values.

    Raises:
        FileExistsError: The target is in use and ``overwrite`` is off.
        FileNotFoundError: A file of the source is missing.
        OSError: The disk is too full. Nothing is left behind.
        TypeError: ``overwrite`` or ``keeps_types`` is no bool.
        ValueError: The configuration needs a model in memory or does not fit, a file is damaged or
            has values that are not finite, or the format cannot hold a layer.
    """
    check_types(bool, overwrite=overwrite, keeps_types=keeps_types)
    check_file_to_file(config)
    check_vacant(target, overwrite)
    with reading(source):
        model, files = _open(source, trust_remote_code)
    config = replace(config, quant_flow=QuantFlow.standard)
    kept = _find_kept(files, config, settings.custom_mode)
    tensors = _prepare(model, config, files, kept)
    state = untie(model, float_state(model))
    if keeps_types:
        tensors.keep_types({name: model.state_dict(keep_vars=True)[name] for name in state})
    fmt = make_format(model, settings.quant_config, settings.options, settings.custom_mode)
    work = FileWork(model, tensors, fmt, devices, kept)
    outline = work.outline()
    with fresh_directory(target, overwrite, size_of(outline), settings.announce) as directory:
        metadata = fmt.file_metadata(outline)
        writer = ShardWriter(directory, outline, settings.max_shard_size, metadata=metadata)
        work.write(writer)
        writer.finish()
        write_model_files(model, fmt.config_section(), directory, settings.tokenizer)
        check_written(outline, CheckpointReader(directory))
        if settings.card is not None:
            settings.card(directory)
    return model


def _open(source: Path, trust_remote_code: bool) -> tuple[nn.Module, Reader]:
    """Return the float model of a directory on the meta device, and its tensors.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Tensors do not fit the model; or it is quantized by an unknown method, or of an
            architecture that Transformers does not know.
    """
    described = read_config_json(source)
    if is_known(described) or (trust_remote_code and described.get("auto_map")):
        model, files = open_in_float(source, trust_remote_code=trust_remote_code)
        if isinstance(files, CheckpointReader):  # what is quantized uses every tensor
            report_unused(source, model, files)
        return model, files
    if described.get(SECTION):
        raise ValueError(
            f"{source} is quantized, and Transformers does not know its architecture "
            f"{described.get('model_type')!r}: give the float model."
        )
    files = CheckpointReader(source)
    return stored_model(source, files.entries), files


def _find_kept(files: Reader, config: Config, mode: str) -> PrequantizedLayers | None:
    """Return the quantized layers of the source if layers in float may keep their codes."""
    keeps = config.keep_prequantized_layers and mode == "quark"
    return PrequantizedLayers(files) if keeps and isinstance(files, DequantizedReader) else None


def _prepare(
    model: nn.Module, config: Config, files: Reader, source: PrequantizedLayers | None
) -> FloatSource:
    """Prepare a model on the meta device as if it were quantized; return the source of its values.

    Args:
        model: The model.
        config: How to quantize it.
        files: Its values.
        source: Layers that keep their codes if the configuration leaves them in float, or None.

    Raises:
        ValueError: The configuration does not fit the model, or values are missing.
    """
    check_steady(model)
    shared = deepcopy(model) if shares_inputs(config) else None
    experts = split_experts(model)
    fill_with_placeholders(model)
    config = resolve_names(config, model)
    config, layers = leave_unpassed_in_float(model, config, select_layers(model, config))
    kept = {} if source is None else without_shared(model, source.find(model, layers))
    stack_experts(experts, keep=[*layers, *kept])
    fill_with_placeholders(model)
    if shared is not None:
        stack_experts(split_experts(shared), keep=[*layers, *kept])
        config = _with_shared_inputs(config, shared)
    values = FloatSource(model, files)
    replace_layers(model, layers)
    _untie_quantized(model)
    mark_as_quantized(model, config)
    note_run(model, config)
    for name in kept:
        assert source is not None
        source.put(model, name)
    declare_kept(model, kept)
    return values


def _with_shared_inputs(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the layers that share an input; see ``with_shared_inputs``.

    Which tensor a layer reads does not depend on values, so products are zeros.

    Args:
        config: The configuration.
        model: The model on the meta device. It is used up.
    """
    fill_with_placeholders(model)
    compute_buffers(model, torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_linear(type(module)):
            module.forward = partial(zero_products, module.out_features)  # type: ignore[method-assign]
    return with_shared_inputs(config, model, None)


def _untie_quantized(model: nn.Module) -> None:
    """Give each quantized parameter that is tied to another a placeholder of its own."""
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for _, layer in quantized_layers(model):
        layer.frozen = True
        for name in layer.parameter_quantizers():
            parameter = getattr(layer, name)
            if owners[id(parameter)] > 1:
                layer._parameters[name] = nn.Parameter(placeholder(parameter), requires_grad=False)
