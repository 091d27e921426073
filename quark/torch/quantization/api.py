"""``ModelQuantizer``: quantize a model in place, step by step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from quark.torch.export.checkpoint.config_json import note_run
from quark.torch.export.checkpoint.prequantized import announce_kept, keep_prequantized_layers
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.containers.safetensors import CopiedFiles
from quark.torch.export.file_to_file import quantize_files
from quark.torch.graph.float_products import widens_products
from quark.torch.graph.parameter_writes import Recorder, announce_write, record_writes
from quark.torch.graph.plain_mode import plain_mode
from quark.torch.graph.residency import iterate_parts, residency_of
from quark.torch.pipeline.activation_store import activation_limit, current_limit, offload_directory
from quark.torch.pipeline.data_source import hold_in_memory
from quark.torch.pipeline.journal import Journal
from quark.torch.pipeline.model_state import restored_on_failure
from quark.torch.pipeline.processes import joined, processes
from quark.torch.pipeline.replicas import check_devices, run_on_replicas
from quark.torch.pipeline.run_request import describe_run
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.algorithms import apply_algorithms
from quark.torch.quantization.arguments import check_config, check_module
from quark.torch.quantization.calibration import calibrate, share_token_counts
from quark.torch.quantization.checks import check, check_processes, discover_structure
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.name_lookup import printable
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.quantization.graph_mode.quantization import (
    check_mode,
    check_trained_graph,
    fix_graph_ranges,
    quantize_graph,
)
from quark.torch.quantization.nn.expert_tokens import all_experts_observed
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.parameter_limit import limit_parameters
from quark.torch.quantization.plan import Plan, prepare
from quark.torch.quantization.preparation import check_plain, mark_as_quantized, quantized_layers
from quark.torch.quantization.trained_ranges import check_trained, fix_ranges

logger = logging.getLogger("quark")

Model = TypeVar("Model", bound=nn.Module)


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: How to quantize.
        multi_device: Accepted for compatibility: layers may lie on any devices.
        offload_dir: Directory for activations that do not fit into memory; None for that of
            temporary files.
        journal: Where blocks go to that algorithms have finished, and from where a run goes on
            that was killed; None for nowhere. See ``Journal``.
        devices: Accelerators of one type that share the work, such as ``["cuda:0", "cuda:1"]``:
            each runs a part of the data and rounds a part of the layers. The model lies on one or
            several of them; the others get copies, or read a model larger than memory block by
            block too. None, or one, to work only where the model lies.
    """

    def __init__(
        self,
        config: Config,
        multi_device: bool = False,
        offload_dir: str | Path | None = None,
        journal: Journal | None = None,
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        check_config(config)
        if isinstance(devices, (str, torch.device)):
            raise TypeError(f"devices: give a list, such as [{str(devices)!r}].")
        self.config = config
        self.multi_device = multi_device
        self.offload_dir = offload_dir
        self.journal = journal
        self.devices = [torch.device(device) for device in devices or ()]

    def quantize_model(
        self,
        model: Model,
        dataloader: Iterable[Any] | None = None,
        statistics: Statistics | None = None,
    ) -> Model:
        """Replace modules of ``model`` in place by quantized ones and compute their scales.

        Args:
            model: A float model, in any of float32, bfloat16 and float16, on any device. With
                ``quant_mode=fx_graph_mode`` a graph, ``torch.export.export(model.eval(),
                args).module()``, which is not changed.
            dataloader: Batches for static ranges and most algorithms, the same in each pass.
            statistics: Statistics of the model from ``collect_statistics``, instead of data.

        Returns:
            The same model, which computes with quantized values. ``freeze`` replaces its weights.
            Of a graph, a quantized copy.

        Raises:
            TypeError: The model is no module, or is compiled, parallel or has adapters.
            ValueError: The configuration or ``devices`` do not fit, data is missing, a value is not
                finite, or the journal is that of another run.
            OSError: The disk is too full, or there is no ``offload_dir``.
            ProcessFailure: Another process of the process group failed.

        Autocast and inference mode are off meanwhile: the model runs in its own types.

        After any exception, an interrupt included, the model is as it was, bit for bit: values that
        algorithms change are kept until the end, 1 GiB in main memory, more in temporary files.

        In an initialized process group of ``torch.distributed``, all processes call this function
        with the same model, configuration and data, and all with a journal or none. Each runs a
        part of the data and rounds a part of the layers, and all get the same model, with the same
        bits as one process alone. So it is with several ``devices``, each of which a thread works
        for; batches are then held in memory.
        """
        check_module(model)
        check_mode(model, self.config)
        if self.config.quant_mode is QuantizationMode.fx_graph_mode:
            return self._quantize_graph(model, dataloader, statistics)  # type: ignore[return-value]
        with self._surroundings(model), restored_on_failure(model) as record:
            return self.quantize_recorded(model, dataloader, statistics, record)

    def check_journal(
        self,
        model: nn.Module,
        dataloader: Iterable[Any] | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        """Refuse a journal with blocks of another run, before any other work.

        Args:
            model: The model; it is unchanged afterwards.
            dataloader: Batches, or None.
            statistics: Statistics of the model, or None.

        Raises:
            ValueError: It is of another run, or as for ``quantize_model``.
        """
        if self.journal is None or not self.journal.describe():
            return
        with self._surroundings(model), joined():
            _begin(self.journal, model, check(model, self.config, dataloader, statistics))

    def _quantize_graph(
        self, graph: Any, dataloader: Iterable[Any] | None, statistics: Statistics | None
    ) -> GraphModule:
        """Return a quantized copy of an exported graph."""
        unused = {"statistics": statistics, "journal": self.journal, "devices": self.devices}
        for name, value in unused.items():
            if value:
                raise ValueError(f"{name}: graphs are quantized without it. Pass a dataloader.")
        _log_to_terminal(self.config.log_severity_level)
        with self._surroundings(graph):
            return quantize_graph(graph, self.config, dataloader)

    def quantize_recorded(
        self,
        model: Model,
        dataloader: Iterable[Any] | None,
        statistics: Statistics | None,
        record: Recorder,
    ) -> Model:
        """Do the work of ``quantize_model`` inside of ``restored_on_failure``.

        So the context may be left after more work, whose failure restores the model too.

        Args:
            model: A float model.
            dataloader: Batches, or None.
            statistics: Statistics of the model, or None.
            record: Takes each parameter before its values are changed.
        """
        _log_to_terminal(self.config.log_severity_level)
        check_plain(model)
        if len(self.devices) < 2:
            return self._quantize(model, dataloader, statistics, record)
        check_devices(self.devices, model)
        data = hold_in_memory(dataloader)

        def quantize(own: nn.Module) -> None:
            self._quantize(own, data, statistics, record if own is model else _forget)

        run_on_replicas(model, self.devices, quantize)
        return model

    def _quantize(
        self,
        model: Model,
        dataloader: Iterable[Any] | None,
        statistics: Statistics | None,
        record: Recorder,
    ) -> Model:
        """Quantize a model as one of the processes, or threads of devices, that there are."""
        journal = None if self.journal is None else self.journal.for_this_thread()
        with self._surroundings(model), joined():
            plan = check(model, self.config, dataloader, statistics)
            check_processes(model, plan)
            announce_kept(model, plan.layers, plan.config)
            if journal is not None:
                _begin(journal, model, plan)
            limit_parameters(model, plan)
            structure = discover_structure(model, plan)
            prepare(model, plan)
            every = plan.config.moe_calibrate_all_experts
            with all_experts_observed(model) if every else nullcontext():
                if structure is not None:
                    with record_writes(record):
                        apply_algorithms(model, plan, structure, journal)
                calibrate(model, plan)
            share_token_counts(model)
            mark_as_quantized(model, plan.config, self.config)
            note_run(model, plan.config, plan.data_digest, widens_products(model))
            logger.info("Model quantization has been completed.")
        return model

    @contextmanager
    def _surroundings(self, model: nn.Module) -> Iterator[None]:
        """Set where activations go, how much memory they take, and the modes of torch."""
        residency = residency_of(model)
        limit = current_limit() if residency is None else residency.activation_limit
        threads = processes().count  # of devices: processes are not joined yet
        bound = activation_limit(limit // threads)
        with offload_directory(self.offload_dir), bound, plain_mode(model):
            yield

    def direct_quantize_checkpoint(
        self,
        pretrained_model_path: str | Path,
        save_path: str | Path,
        keep_excluded_layers_as_original_model_state: bool = False,
        *legacy_device_args: str | torch.device,
        weight_converters: list[Any] | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        presharded_weights: dict[str, int] | None = None,
        custom_mode: str = "quark",
        overwrite: bool = False,
    ) -> None:
        """Quantize the files of a model to the files of a quantized one, tensor by tensor.

        No model is in memory: a few of its largest tensors are. Tensors of a quantized model are
        dequantized first. The files are those that
        ``quantize_model``, ``freeze`` and ``ModelExporter`` write, byte for byte. Everything that
        weights alone decide can be quantized: schemes of weights, and with dynamic activations.
        Architectures that Transformers does not know are quantized by the names and shapes of
        their tensors, and a warning lists which.

        Args:
            pretrained_model_path: Directory of the model, float or quantized, with safetensors.
            save_path: Directory to write. It is written beside and renamed when complete.
            keep_excluded_layers_as_original_model_state: Whether tensors that are not quantized
                keep the types of the files; by default they take that of ``config.json``.
            legacy_device_args: A device, for callers that pass ``device`` by position.
            weight_converters: Not supported: names are converted as Transformers does it.
            device: Device that quantizes, or several that take turns; None for the CPU.
            presharded_weights: Not supported: files hold whole tensors.
            custom_mode: Checkpoint format, a name of ``FORMATS`` (`export/formats/registry.py`).
            overwrite: Whether an output may be replaced.

        Raises:
            FileExistsError: ``save_path`` is in use and ``overwrite`` is off.
            FileNotFoundError: A file of the model is missing.
            OSError: The disk is too full. Nothing is left behind.
            TypeError: There is more than one device by position.
            ValueError: The configuration has algorithms or static activations or does not fit, the
                model is quantized by an unknown method, a file is damaged or has values that are
                not finite, or the format cannot hold a layer.
        """
        if weight_converters or presharded_weights:
            name = "weight_converters" if weight_converters else "presharded_weights"
            raise ValueError(
                f"{name} is not supported: names are converted as Transformers does it, from files "
                "that hold whole tensors. Leave it out."
            )
        _log_to_terminal(self.config.log_severity_level)
        source = Path(pretrained_model_path)
        quantize_files(
            self.config,
            source,
            Path(save_path),
            ExportSettings(custom_mode=custom_mode, tokenizer=CopiedFiles(source)),
            overwrite,
            keep_excluded_layers_as_original_model_state,
            devices=_devices(legacy_device_args, device),
        )
        logger.info("Checkpoint quantization has been completed.")

    @staticmethod
    @torch.no_grad()
    def freeze(
        model: Model, quantize: bool | None = None, runtime_options: Any | None = None
    ) -> Model:
        """Replace the weights of a quantized model in place by their quantized values.

        Tied weights are untied where one side is quantized, or both. Ranges that followed the model
        while it trained take their last values, and nothing that is quantized trains any more.
        Layers in float that a quantized source has as codes take these codes, if nothing has
        changed them (``Config.keep_prequantized_layers``).

        Args:
            model: A model from ``quantize_model``, in evaluation mode if it has trained.
            quantize: Accepted for compatibility.
            runtime_options: No effect, with a warning; see ``enable_native_inference``.

        Returns:
            The same model.

        Raises:
            ValueError: The model has no quantized module, trains, or has a range without a start;
                or a graph is in training mode.
        """
        check_module(model)
        check_plain(model)
        if runtime_options is not None:
            logger.warning("runtime_options has no effect before the exported model is loaded.")
        layers = dict(quantized_layers(model))
        if not layers:
            raise ValueError("Nothing to freeze: call ModelQuantizer.quantize_model first.")
        if isinstance(model, GraphModule):
            check_trained_graph(model)
        check_trained(layers)
        fix_ranges(model)
        if isinstance(model, GraphModule):
            fix_graph_ranges(model)
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        left = {name: layer for name, layer in layers.items() if not layer.frozen}
        for part in iterate_parts(model, left):
            for name, layer in left.items():
                if part.holds(name):
                    _freeze(layer, owners)
        keep_prequantized_layers(model)
        return model


def _begin(journal: Journal, model: nn.Module, plan: Plan) -> None:
    """Begin a run, or go on with it, if the journal is that of a plan."""
    is_asked = processes().is_first  # the digests of a model take time
    made = (model, plan.config, plan.data_digest, plan.statistics)
    journal.begin(describe_run(*made) if is_asked else {})


def _forget(parameter: nn.Parameter) -> None:
    """Take the place of a recorder of a copy of a model, which nothing restores."""


def _devices(legacy: tuple[str | torch.device, ...], device: Any) -> list[torch.device]:
    """Return the devices of ``device`` or of an argument by position; the CPU without.

    Raises:
        TypeError: There is more than one by position, or both.
    """
    if len(legacy) > (device is None):
        raise TypeError("Give one device, by keyword: device='cuda'.")
    given = legacy[0] if legacy else device or "cpu"
    several = [given] if isinstance(given, (str, torch.device)) else given
    return [torch.device(each) for each in several]


class _Formatter(logging.Formatter):
    """Writes messages without characters that control a terminal: names come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _log_to_terminal(severity: int | None) -> None:
    """Show the log of this package unless the application has set up its own logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("[QUARK-%(levelname)s]: %(message)s"))
        handler.addFilter(lambda record: processes().is_first)
        logger.addHandler(handler)
        # 0, 1, 2, … of the configuration are debug, info, warning, …
        logger.setLevel(logging.DEBUG + 10 * (1 if severity is None else severity))


def _freeze(layer: FakeQuantizedLayer, owners: Counter[int]) -> None:
    for name, quantizer in layer.parameter_quantizers().items():
        parameter = getattr(layer, name)
        is_tied = owners[id(parameter)] > 1  # the other owner keeps its float values
        if is_tied or not parameter.is_contiguous():
            # A loaded weight is contiguous; the product of another layout may round differently.
            copied = parameter.detach().clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(copied, parameter.requires_grad)
            setattr(layer, name, parameter)
        announce_write(parameter)
        quantizer.freeze_(parameter.data)
    layer.frozen = True
    layer.end_training()
