"""A pass over the blocks of a model whose results are in a journal.

What an algorithm changes in a block are values of parameters, scales of quantizers, and flags. A
file of the journal has all of it, so a restart gives the block the state that it had, and only
runs the data through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.files import check_space
from quark.torch.graph.parameter_writes import record_writes, write_
from quark.torch.graph.residency import residency_of, resident
from quark.torch.pipeline.journal import Entry, Journal
from quark.torch.pipeline.statistics import digest
from quark.torch.quantization.nn.experts import LinearExperts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import PARTS, TensorQuantizer


class Run(NamedTuple):
    """How the data ran through a block.

    Attributes:
        is_first: Whether it ran before the block was changed; else behind that.
        outputs: What the block returned for the first batch; empty if the data did not run.
    """

    is_first: bool
    outputs: list[torch.Tensor]


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
                self.finish_restored(block, [])
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
        scales = _scales(layers)
        notes = {
            "block": block,
            "runs_first": run.is_first,
            "outputs": digest(*run.outputs) if run.outputs else None,
            "parameters": list(parameters),
            "frozen": [name for name, layer in layers.items() if layer.frozen],
            "observing": [n for n, q in _quantizers(layers).items() if q.is_observing],
            "tokens": {n: experts.token_counts for n, experts in self._experts(block).items()},
        }
        with resident(self._model, *parameters):
            values = {name: parameter.data for name, parameter in parameters.items()}
            entry = self._files.write(block, values | scales, notes)
            self._refer(entry, parameters, scales)

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
            self._refer(entry, parameters, _scales(layers))

    def finish_restored(self, block: str, outputs: list[torch.Tensor]) -> None:
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
        expected = notes["outputs"]
        if outputs and expected is not None and digest(*outputs) != expected:
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

    def _refer(
        self,
        entry: Entry,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, torch.Tensor],
    ) -> None:
        """Let a model larger than memory read the values from the journal from now on."""
        residency: Any = residency_of(self._model)
        if residency is not None:
            residency.refer(entry.path, parameters, scales)


def _quantizers(layers: Mapping[str, FakeQuantizedLayer]) -> dict[str, TensorQuantizer]:
    """Return the quantizers of layers by name of the layer and of the tensor."""
    return {f"{n}.{t}": q for n, layer in layers.items() for t, q in layer.quantizers().items()}


def _scales(layers: Mapping[str, FakeQuantizedLayer]) -> dict[str, torch.Tensor]:
    """Return scales and zero points by name of the layer, of the tensor and of the attribute."""
    parts = ((f"{n}.{p}", getattr(q, p)) for n, q in _quantizers(layers).items() for p in PARTS)
    return {name: value for name, value in parts if value is not None}
