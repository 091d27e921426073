"""Pipelines of diffusers: quantize components, write the pipeline, and load it again.

A pipeline holds several models. Each component has a configuration of its own, and is calibrated on
what the pipeline gives it in its own calls. Example::

    pipeline = DiffusionPipeline.from_pretrained("…")
    quantize_pipeline(pipeline, {"transformer": config}, ["a red cube", "a blue sphere"])
    export_pipeline(pipeline, "pipeline-int8")
    pipeline = load_pipeline("pipeline-int8")
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.digests import write_digests
from quark.torch.export.api import ModelExporter, ModelImporter
from quark.torch.export.checkpoint.config_json import CONFIG, SECTION, read_config_json
from quark.torch.export.checkpoint.headers import STEM
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.export.diffusers_loading import import_diffusers
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import load_checkpoint
from quark.torch.files import fresh_directory, read_json, write_json
from quark.torch.pipeline.model_state import restored_on_failure
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.nn.layer import QuantizedLayer

INDEX = "model_index.json"
_STEM = "diffusion_pytorch_model"  # of the names of files that diffusers reads
METHODS = ("forward", "encode", "decode")  # of a component that a pipeline calls
Calls = Iterable[Any] | Callable[[Any], object]


def quantize_pipeline(
    pipeline: Any, configs: Mapping[str, Config], calls: Calls | None = None
) -> Any:
    """Quantize and freeze components of a pipeline in place.

    Args:
        pipeline: A pipeline of diffusers, in float.
        configs: Name of a component, such as ``transformer``, to its configuration. Other
            components stay in float.
        calls: Calibration data. Each item is a prompt, or a mapping of arguments of the pipeline.
            Or a function that is called with the pipeline, and calls it. None for configurations
            that need no data.

    Returns:
        The same pipeline.

    Raises:
        ValueError: A component is unknown or does not fit its configuration, or data is missing.

    After an exception of any kind, an interrupt included, no component is quantized: all are as
    they were, bit for bit, unless it came while weights are frozen, at the very end. For that,
    values that algorithms change are kept until then: for each component up to 1 GiB in main
    memory, more in temporary files.
    """
    models = {name: _component(pipeline, name) for name in configs}
    recorded: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    if calls is not None:
        with ExitStack() as stack:
            for name, model in models.items():
                stack.enter_context(_record(model, recorded[name]))
            _run(pipeline, calls)
    for name in models:
        if calls is not None and not recorded[name]:
            raise ValueError(f"{name}: the pipeline did not call it. Leave it out of configs.")
    with ExitStack() as stack:
        for name, model in models.items():
            batches = recorded[name] if calls is not None else None
            record = stack.enter_context(restored_on_failure(model))
            try:
                with _callable_by_method(model, batches or []):
                    quantizer = ModelQuantizer(configs[name])
                    quantizer.quantize_recorded(model, batches, None, record)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    for model in models.values():
        ModelQuantizer.freeze(model)
    return pipeline


def _component(pipeline: Any, name: str) -> nn.Module:
    models = {n: c for n, c in pipeline.components.items() if isinstance(c, nn.Module)}
    return models[one_of(name, models, "component")]


def _run(pipeline: Any, calls: Calls) -> None:
    """Call a pipeline on all items, or let a function call it."""
    if callable(calls):
        calls(pipeline)
        return
    for item in calls:
        if isinstance(item, Mapping):
            pipeline(**item)
        else:
            pipeline(item)


@contextmanager
def _record(model: Any, batches: list[dict[str, Any]]) -> Iterator[None]:
    """Record the arguments of each call from outside of a model as a batch on the CPU."""
    inside = False

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*args, **kwargs)
            batches.append(_batch(name, signature.bind(*args, **kwargs)))
            inside = True
            try:
                return method(*args, **kwargs)
            finally:
                inside = False

        return call

    with _patched(model, {name: recording(name, method) for name, method in _methods(model)}):
        yield


def _methods(model: Any) -> list[tuple[str, Callable[..., Any]]]:
    return [(name, getattr(model, name)) for name in METHODS if hasattr(model, name)]


def _batch(method: str, bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a call by name; those of another method than forward name it."""
    batch: dict[str, Any] = {} if method == "forward" else {"call": method}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            batch |= _to_cpu(value)
        elif value is not None:
            batch[name] = _to_cpu(value)
    return batch


def _to_cpu(value: Any) -> Any:
    """Return a copy of tensors, nested ones included."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return type(value)(map(_to_cpu, value)) if type(value) in (list, tuple) else value


@contextmanager
def _callable_by_method(model: Any, batches: list[dict[str, Any]]) -> Iterator[None]:
    """Let ``model(call="decode", …)`` call another method, if the batches have such calls."""
    methods = dict(_methods(model))

    def forward(call: str = "forward", **arguments: Any) -> Any:
        return methods[call](**arguments)

    with _patched(model, {"forward": forward} if any("call" in b for b in batches) else {}):
        yield


@contextmanager
def _patched(model: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give an instance other methods meanwhile."""
    before = {name: model.__dict__[name] for name in attributes if name in model.__dict__}
    model.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del model.__dict__[name]
        model.__dict__.update(before)


def export_pipeline(pipeline: Any, directory: str | Path, overwrite: bool = False) -> None:
    """Write a pipeline. Quantized components are checkpoints of this package; others are in float.

    Args:
        pipeline: A pipeline with frozen components from ``quantize_pipeline``.
        directory: Directory to write. It is written beside and renamed when complete.
        overwrite: Whether an existing directory may be replaced.

    Raises:
        FileExistsError: The directory is in use and ``overwrite`` is off.
        ValueError: No component is quantized, or one cannot be written.
    """
    check_types(bool, overwrite=overwrite)
    components = pipeline.components
    quantized = {name for name, component in components.items() if _is_quantized(component)}
    if not quantized:
        raise ValueError("No component is quantized: call quantize_pipeline before an export.")
    with fresh_directory(directory, overwrite) as partial:
        for name, component in components.items():
            if name in quantized:
                _export_component(component, partial / name)
            elif hasattr(component, "save_pretrained"):
                component.save_pretrained(partial / name)
        pipeline.save_config(partial)


def _is_quantized(component: Any) -> bool:
    is_model = isinstance(component, nn.Module)
    return is_model and any(isinstance(m, QuantizedLayer) for m in component.modules())


def _export_component(component: Any, directory: Path) -> None:
    """Write a quantized component; a model of diffusers in the names that diffusers reads."""
    is_diffusers = hasattr(component, "to_json_string")
    settings = ExportSettings(file_name=_STEM if is_diffusers else STEM)
    ModelExporter(None, directory).export(SAFETENSORS, component, settings)
    if is_diffusers:
        section = read_json(directory / CONFIG)[SECTION]
        described = {**json.loads(component.to_json_string()), SECTION: section}
        write_json(directory / CONFIG, described)
        write_digests(directory)


def load_pipeline(directory: str | Path, **options: Any) -> Any:
    """Load a pipeline that ``export_pipeline`` wrote.

    Args:
        directory: Directory of the pipeline.
        options: Passed to ``DiffusionPipeline.from_pretrained``, such as ``torch_dtype`` of the
            components in float.

    Raises:
        FileNotFoundError: A file is missing.
        ImportError: The package diffusers is missing.
        ValueError: A file is damaged, or does not fit the model of its component.
    """
    directory, diffusers = Path(directory), import_diffusers()
    index = read_json(directory / INDEX)
    if not isinstance(index, dict):
        raise ValueError(f"{directory / INDEX} does not describe a pipeline.")
    components = {
        name: _load_component(directory / name, entry, diffusers)
        for name, entry in index.items()
        if _holds_quantized(directory, name)
    }
    return diffusers.DiffusionPipeline.from_pretrained(directory, **components, **options)


def _holds_quantized(directory: Path, name: str) -> bool:
    """Whether a component is a checkpoint of this package."""
    if Path(name).name != name or not (directory / name / CONFIG).is_file():
        return False
    section = read_config_json(directory / name).get(SECTION)
    return isinstance(section, dict) and section.get("quant_method") in FORMATS


def _load_component(directory: Path, entry: Any, diffusers: Any) -> nn.Module:
    library, name = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    if library != "diffusers":
        return load_checkpoint(directory)
    kind = _find_class(diffusers, name, directory)
    described = {k: v for k, v in read_config_json(directory).items() if k != SECTION}
    try:
        with torch.device("meta"):
            model = kind.from_config(described)
        state = model.state_dict()
        if any(n not in state for n, _ in model.named_buffers()):  # computed when it is built
            model = kind.from_config(described)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{directory}: diffusers cannot build {name}: {first}") from error
    return ModelImporter(directory, "safetensors").import_model_info(model)


def _find_class(diffusers: Any, name: Any, directory: Path) -> Any:
    """Return the class of a model of diffusers.

    Raises:
        ValueError: It has no such class.
    """
    kind = getattr(diffusers, name, None) if name in dir(diffusers) else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ValueError(
            f"{directory}: its class is {name!r}, which diffusers {diffusers.__version__} does not "
            "have. Install a version that has it."
        )
    return kind
