"""A pass over the blocks of a model whose results are in a journal.

What an algorithm changes in a block are values of parameters, scales of quantizers, and flags. A
file of the journal has all of it, so a restart gives the block the state that it had, and only
runs the data through it.

Several processes have the same values after a block, so one of them writes. Each of them knows how
its own part of the data ran; notes have that of all, so any number of processes can go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.files import check_space
from quark.torch.graph.parameter_writes import record_writes, write_
from quark.torch.graph.residency import residency_of, resident
from quark.torch.pipeline.journal import Entry, Journal
from quark.torch.pipeline.processes import processes
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.quantizer import PARTS, TensorQuantizer


class Run(NamedTuple):
    """How the data of this process ran through a block.

    Attributes:
        is_first: Whether it ran before the block was changed; else after that.
        outputs: Number of the first batch of each leaf -> digest of what the block returned for
            it; empty if the data did not run.
    """

    is_first: bool
    outputs: dict[int, str]


class JournaledPass:
    """One pass over the blocks of a model.

    Args:
        model: The model.
        blocks: Names of the blocks.
        journal: Where finished blocks are.

    Raises:
        OSError: The disk has no room for the other blocks.
    """

    def __init__(self, model: nn.Module, blocks: list[str], journal: Journal) -> None:
        self._model, self._blocks = model, blocks
        self._files = journal.begin_pass(blocks)
        self._written: dict[int, nn.Parameter] = {}
        left = [model.get_submodule(block) for block in blocks if block not in self]
        parameters = (p for module in left for p in module.parameters())
        check_space(journal.directory, sum(p.numel() * p.itemsize for p in parameters))

    def __contains__(self, block: str) -> bool:
        """Whether a block is finished."""
        return block in self._files.entries

    def restore_all(self) -> bool:
        """Restore all blocks if all are finished, and return whether they are; no data runs."""
        if not all(block in self for block in self._blocks):
            return False
        for block in self._blocks:
            with resident(self._model, block):
                self.restore(block)
                self.finish_restored(block, {})
        return True

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note which parameters change while the context is open."""
        self._written = {}
        with record_writes(lambda p: self._written.update({id(p): p})):
            yield

    def write(self, block: str, run: Run) -> None:
        """Write a block to the journal that has been watched.

        Raises:
            OSError: The disk is full.
        """
        names = {id(p): name for name, p in self._model.named_parameters()}
        parameters = {names[key]: p for key, p in self._written.items() if key in names}
        layers = self._layers(block)
        notes = {
            "block": block,
            **self._note_data(block, run),
            "parameters": list(parameters),
            "frozen": [name for name, layer in layers.items() if layer.frozen],
            "observing": [n for n, q in _quantizers(layers).items() if q.is_observing],
        }
        with resident(self._model, *parameters):
            values = {name: parameter.data for name, parameter in parameters.items()}
            entry = self._files.write(block, values | _scales(layers), notes)
        self._refer(block, entry)

    def _note_data(self, block: str, run: Run) -> dict[str, Any]:
        """Return how the data of all processes ran through a block."""
        own: dict[str, Any] = {
            "runs_first": run.is_first,  # also where a process has no data
            "outputs": run.outputs,
            "tokens": {n: experts.token_counts for n, experts in self._experts(block).items()},
        }
        every = processes().exchange(own)
        return {
            "runs_first": all(other["runs_first"] for other in every),
            "outputs": _union(other["outputs"] for other in every),
            "tokens": {n: _union(other["tokens"][n] for other in every) for n in own["tokens"]},
        }

    def runs_first(self, block: str) -> bool:
        """Whether the data runs through a finished block before it is restored."""
        return bool(self._files.entries[block].notes["runs_first"])

    def restore(self, block: str) -> None:
        """Give a block the state that it had when it was finished."""
        entry = self._files.entries[block]
        notes, layers = entry.notes, self._layers(block)
        parameters = {name: self._model.get_parameter(name) for name in notes["parameters"]}
        quantizers = _quantizers(layers)
        with resident(self._model, *parameters):
            for name, values in entry.tensors().items():
                if name in parameters:
                    write_(parameters[name], values)
                else:
                    tensor, _, part = name.rpartition(".")
                    layer = layers[tensor.rpartition(".")[0]]
                    setattr(quantizers[tensor], part, values.to(layer.weight.device))
            for name, layer in layers.items():
                layer.frozen = name in notes["frozen"]
            for name, quantizer in quantizers.items():
                quantizer.is_observing = name in notes["observing"]
        self._refer(block, entry)

    def finish_restored(self, block: str, outputs: dict[int, str]) -> None:
        """Check that the data ran through a restored block as it did before.

        Args:
            block: Name of the block.
            outputs: As in ``Run``.

        Raises:
            ValueError: This machine computes other values.
        """
        notes = self._files.entries[block].notes
        for name, experts in self._experts(block).items():
            experts.token_counts = {int(n): counts for n, counts in notes["tokens"][name].items()}
        expected = {int(number): value for number, value in notes["outputs"].items()}
        if any(value != expected.get(number, value) for number, value in outputs.items()):
            raise ValueError(
                f"The outputs of {block} are not those of the run that was interrupted: this "
                "machine rounds differently, by another processor, another number of threads or "
                "another library. Go on where the run began, or throw its blocks away: --restart, "
                "or Journal(directory, restart=True)."
            )

    def _layers(self, block: str) -> dict[str, FakeQuantizedLayer]:
        modules = self._model.get_submodule(block).named_modules(prefix=block)
        return {name: m for name, m in modules if isinstance(m, FakeQuantizedLayer)}

    def _experts(self, block: str) -> dict[str, LinearExperts]:
        modules = self._model.get_submodule(block).named_modules(prefix=block)
        return {name: m for name, m in modules if isinstance(m, LinearExperts)}

    def _refer(self, block: str, entry: Entry) -> None:
        """Let a model larger than memory read the values from the journal from now on."""
        residency: Any = residency_of(self._model)
        if residency is None:
            return
        parameters = {n: self._model.get_parameter(n) for n in entry.notes["parameters"]}
        scales = _scales(self._layers(block))
        with resident(self._model, *parameters):
            stored = {name: x for name, x in scales.items() if name in entry.notes["strides"]}
            residency.refer(entry.path, parameters, stored)


def _union(parts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the entries of several mappings."""
    return {key: value for part in parts for key, value in part.items()}


def _quantizers(layers: Mapping[str, FakeQuantizedLayer]) -> dict[str, TensorQuantizer]:
    """Return the quantizers of layers by name of the layer and of the tensor."""
    return {f"{n}.{t}": q for n, layer in layers.items() for t, q in layer.quantizers().items()}


def _scales(layers: Mapping[str, FakeQuantizedLayer]) -> dict[str, torch.Tensor]:
    """Return scales and zero points by name of the layer, of the tensor and of the attribute."""
    parts = ((f"{n}.{p}", getattr(q, p)) for n, q in _quantizers(layers).items() for p in PARTS)
    return {name: value for name, value in parts if value is not None}
