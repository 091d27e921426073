"""Units of the work from files to files: tensors that are read, quantized and written together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from threading import Condition
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.float_source import FloatSource
from quark.torch.export.checkpoint.prequantized import PrequantizedLayers
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.export.checkpoint.transformers_names import split_or_fused
from quark.torch.export.checkpoint.writer import (
    float_state,
    layer_parts,
    merged_scales,
    original_names,
    untie,
)
from quark.torch.export.formats.base import ExportFormat
from quark.torch.files import size_of
from quark.torch.numerics.finite import check_finite
from quark.torch.numerics.native.memory import spares_memory
from quark.torch.pipeline.allocator import reuse_freed_memory
from quark.torch.pipeline.batches import show_progress
from quark.torch.quantization.calibration import calibrate_layers, group_by_parent
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import PARTS
from quark.torch.quantization.preparation import quantized_layers

PART = 16 << 20  # bytes of a tensor in float that are read, checked and written at the same time
IN_FLIGHT = 3  # times the largest unit: bytes of float tensors that are worked on at the same time


@dataclass
class _Unit:
    """Tensors that are read, quantized and written together.

    Attributes:
        groups: Groups of quantized layers; those of a group share a scale or a stored tensor.
        tensors: Names of tensors in float.
        stored: Name in the output of the only tensor, if it is in float and copied in parts.
        size: Bytes of its tensors in float.
    """

    groups: list[tuple[str, ...]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    stored: str | None = None
    size: int = 0


Parts = dict[str, dict[str, torch.Tensor]]  # layer -> stored tensors by names relative to it


class FileWork:
    """The units of a prepared model, and what is done with each.

    Args:
        model: The model, with placeholders for values.
        source: Its values.
        fmt: Format to write.
        devices: Devices that quantize, in turn.
        kept: What reads the packed layers of the model, which keep their codes; None without.
    """

    def __init__(
        self,
        model: nn.Module,
        source: FloatSource,
        fmt: ExportFormat,
        devices: Sequence[torch.device],
        kept: PrequantizedLayers | None = None,
    ) -> None:
        self.model, self.source, self.fmt, self.devices = model, source, fmt, cycle(devices)
        self.kept = kept
        modules = model.named_modules()
        self.layers = {name: m for name, m in modules if isinstance(m, QuantizedLayer)}
        self.state = untie(model, float_state(model))
        self.groups = self._find_groups()
        self._done: dict[tuple[str, ...], Parts] = {}

    def outline(self) -> dict[str, torch.Tensor]:
        """Return the tensors that will be written, on the meta device, and none twice.

        The stored tensors of a layer are known once one like it has been quantized. That is done
        here for one layer of each kind; ``write`` takes the result over.
        """
        kinds: dict[Any, dict[str, torch.Tensor]] = {}
        for group in self.groups:
            if any(self._kind(name) not in kinds for name in group):
                self._done[group] = self._quantize(group)
                for name, parts in self._done[group].items():
                    kinds[self._kind(name)] = {part: t.to("meta") for part, t in parts.items()}
        parts_of = {name: kinds[self._kind(name)] for name in self.layers}
        state = {name: tensor.to("meta") for name, tensor in self.state.items()}
        self._units = self._divide(state, parts_of)
        return original_names(self.model, self.fmt.join(state | self._named(parts_of)))

    def _kind(self, name: str) -> Any:
        """Return a key that layers share whose stored tensors have equal shapes and types."""
        layer = self.layers[name]
        parameters = {n: getattr(layer, n, None) for n in PARAMETERS}
        shapes = [None if p is None else (p.shape, p.dtype) for p in parameters.values()]
        return layer.float_class, repr(layer.quant_config), *shapes

    def _named(self, parts_of: Parts) -> dict[str, torch.Tensor]:
        """Return the stored tensors of layers by their full names, in the order of the model."""
        return {
            self.fmt.stored_name(f"{name}.{part}"): tensor
            for name in self.layers
            if name in parts_of
            for part, tensor in parts_of[name].items()
        }

    def _find_groups(self) -> list[tuple[str, ...]]:
        """Return groups of layers that share scales, or are stored in one tensor."""
        config: Any = self.model.quant_config
        patterns = [*config.shared_scale_groups, *(self.fmt.options.weight_merge_groups or [])]
        anew = dict(quantized_layers(self.model))
        joined = [names for group in patterns for names in group_by_parent(anew, group)]
        stored: dict[str, list[str]] = defaultdict(list)
        for name in anew:
            stored[self.source.origin(f"{name}.weight")].append(name)
        group_of = {name: [name] for name in self.layers}
        for names in (*joined, *stored.values()):
            merged = list(dict.fromkeys(m for name in names for m in group_of[name]))
            group_of |= dict.fromkeys(merged, merged)
        return list(dict.fromkeys(tuple(group) for group in group_of.values()))

    def _divide(self, state: dict[str, torch.Tensor], parts_of: Parts) -> list[_Unit]:
        """Return the units of the work: a tensor, a group of layers, or a block of the model.

        What Transformers splits or fuses on saving, or the format joins, is converted together: in
        a block.
        """
        every = [*state, *self._named(parts_of)]
        joined = split_or_fused(self.model, every) | set(filter(self.fmt.is_joined, every))
        units: dict[Any, _Unit] = defaultdict(_Unit)
        for group in self.groups:
            names = self._named({name: parts_of[name] for name in group})
            unit = units[_block(group[0]) if joined & {*names} else group]
            unit.groups.append(group)
            unit.size += sum(size_of(dict(self.layers[n].named_parameters())) for n in group)
        for name, tensor in state.items():
            unit = units[_block(name) if name in joined else name]
            unit.tensors.append(name)
            size = size_of({name: tensor})
            if size > PART and name not in joined and self.source.stores_rows(name):
                (unit.stored,) = original_names(self.model, self.fmt.join({name: tensor}))
                size = PART
            unit.size += size
        return list(units.values())

    def write(self, writer: ShardWriter) -> None:
        """Quantize and write all units, by as many threads as torch has.

        Raises:
            OSError: The disk is full, or a file cannot be read.
            ValueError: A value is not finite.
        """
        threads = torch.get_num_threads()
        budget = _Budget(IN_FLIGHT * max(unit.size for unit in self._units))

        def run(unit: _Unit) -> None:
            with budget.taken(unit.size):
                if unit.stored is not None:
                    self._copy(unit.tensors[0], unit.stored, writer)
                    return
                for name, tensor in self._tensors(unit).items():
                    writer.add(name, tensor)

        # Operations of each of these threads are on one thread.
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        with nullcontext() if spares_memory() else reuse_freed_memory():
            try:
                futures = [pool.submit(run, unit) for unit in self._units]
                for future in show_progress(as_completed(futures), "quantizing"):
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(threads)

    def _copy(self, name: str, stored: str, writer: ShardWriter) -> None:
        """Write a tensor in float, part after part."""
        for rows in self.source.read_rows(name, PART):
            check_finite(name, rows)
            writer.add_rows(stored, rows)

    def _tensors(self, unit: _Unit) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit as they are stored."""
        state = self.source.read(unit.tensors)
        for name, tensor in state.items():
            check_finite(name, tensor)
        for group in unit.groups:
            state |= self._named(self._done.pop(group, {}) or self._quantize(group))
        return original_names(self.model, self.fmt.join(state))

    @torch.no_grad()
    def _quantize(self, group: tuple[str, ...]) -> Parts:
        """Return the stored tensors of a group of layers, which have no values again afterwards."""
        layers = {n: x for n in group if isinstance(x := self.layers[n], FakeQuantizedLayer)}
        if not layers:
            return {name: self._read_kept(name) for name in group}
        with self._values(layers):
            calibrate_layers(layers, self.model.quant_config)  # type: ignore[arg-type]
            for layer in layers.values():
                self._freeze(layer)
            scales = merged_scales(layers, self.fmt.options)
            return {n: layer_parts(n, x, self.fmt, scales.get(n, {})) for n, x in layers.items()}

    def _read_kept(self, name: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a layer that keeps the codes of the source."""
        assert self.kept is not None
        self.kept.fill(self.model, name, torch.device("cpu"))
        try:
            return layer_parts(name, self.layers[name], self.fmt, {})
        finally:
            self.kept.release(self.model, name)

    def _freeze(self, layer: FakeQuantizedLayer) -> None:
        """Replace values by quantized values, unless only codes are stored, and they are the same.

        Two passes over the weight are saved.
        """
        quantizers = layer.parameter_quantizers()
        keeps = all(q.keeps_codes(getattr(layer, n).dtype) for n, q in quantizers.items())
        layer.frozen = not keeps or self.fmt.options.weight_format != "real_quantized"
        for name, quantizer in quantizers.items() if layer.frozen else ():
            quantizer.freeze_(getattr(layer, name).data)

    @contextmanager
    def _values(self, layers: Mapping[str, FakeQuantizedLayer]) -> Iterator[None]:
        """Give layers their values while the context lasts."""
        device = next(self.devices)
        held = {name: dict(layer._parameters) for name, layer in layers.items()}
        names = [
            f"{n}.{p}"
            for n, parameters in held.items()
            for p, v in parameters.items()
            if v is not None
        ]
        try:
            for name, value in self.source.read(names).items():
                owner, _, own = name.rpartition(".")
                layer = layers[owner]
                if own not in layer.parameter_quantizers():
                    check_finite(name, value)
                value = value.to(device).contiguous()
                layer._parameters[own] = nn.Parameter(value, requires_grad=False)
            yield
        finally:
            for name, layer in layers.items():
                layer._parameters.update(held[name])
                for quantizer in layer.quantizers().values():
                    for part in PARTS:
                        setattr(quantizer, part, None)


class _Budget:
    """Bytes that threads may work on at the same time."""

    def __init__(self, size: int) -> None:
        self._free, self._changed = size, Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until ``size`` bytes are free, and take them while the context lasts."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _block(name: str) -> str:
    """Return the name of the block that holds a tensor: up to the first number."""
    parts = name.split(".")
    depth = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: depth + 1])
