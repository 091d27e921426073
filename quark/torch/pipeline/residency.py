"""Residency of parameters: those of a model larger than memory are there only while they are used.

A parameter that is not resident keeps its identity, shape, type and device, but its values are one
NaN, expanded to the shape::

    unit                    while it runs                  after others needed the room
    model.layers.3          values of the files            NaN, expanded
    model.layers.4          values that a pass changed     NaN; the values are in the scratch files

Nothing else differs from a model in memory: passes over blocks are the same code, with the same
bits. What reads a parameter outside of ``forward`` does so inside of ``resident``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quark.torch.graph.alignment import aligned
from quark.torch.graph.parameter_writes import record_writes
from quark.torch.numerics.finite import check_finite
from quark.torch.pipeline.memory_limit import MemoryLimit
from quark.torch.pipeline.read_ahead import ReadAhead, Source
from quark.torch.pipeline.scratch import Scratch
from quark.torch.pipeline.unit_cache import Unit, UnitCache
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.quantizer import PARTS, TensorQuantizer


class StoredLayers(Protocol):
    """Layers of a model that are in the source as codes, by their names."""

    def fill(self, model: nn.Module, name: str, device: torch.device) -> None:
        """Read codes and scales of a layer."""
        ...

    def release(self, model: nn.Module, name: str) -> None:
        """Take the values of a layer from memory."""
        ...

    def size(self, name: str) -> int:
        """Return the bytes of codes and scales of a layer."""
        ...


class Residency(UnitCache):
    """Loads the units of a model when they are used, and releases the least recently used ones.

    Where the limit has room for three units, the next unit is read while one is worked on.

    Args:
        model: A model with any values; it gets those of the source.
        source: The values.
        limit: What may be resident; see ``UnitCache``.
        scratch: Files for values that passes over the model have changed.
        device: Where units are brought to.
        place: Where the files of the source are, by which a journal knows the model; or None.

    Attributes:
        peak: The most bytes that were resident.
        reads_ahead: Whether the next unit is read before it is used, where there is room.
    """

    reads_ahead = True

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        limit: MemoryLimit,
        scratch: Scratch,
        device: torch.device | str = "cpu",
        place: Path | None = None,
    ) -> None:
        super().__init__(model, limit, device)
        self._model = model
        self._stored: dict[str, StoredLayers] = {}  # by name of the layer
        self.source, self.scratch, self.place = source, scratch, place
        self._held: dict[int, _Held] = {}  # by id of the parameter
        self._scales: dict[str, torch.Tensor] = {}  # as they are in the scratch files
        # Parameters are kept, so that no other one gets their id.
        self._originals = {id(p): (name, p) for name, p in model.named_parameters()}
        self._checked: set[str] = set()  # parameters whose values have been checked
        for unit in self.units.values():
            for _, parameter in unit.parameters():
                parameter.data = placeholder(parameter, self.device)
        self._total = sum(map(self._size_of, self.units.values()))
        self._ahead = ReadAhead(source, self.device)
        self._next = _successors(list(self.units))
        self._last = ""  # the unit that was loaded last

    def read_by(self, name: str, layers: StoredLayers) -> None:
        """Read the values of a packed layer by ``layers`` from now on.

        Args:
            name: Name of the layer, which has no values.
            layers: What reads and releases them.
        """
        self._stored[name] = layers
        for unit in self.units.values():
            if unit.part.holds(name) and unit.name in self._sizes:
                layers.fill(self._model, name, self.device)

    def _stored_in(self, unit: Unit) -> list[str]:
        """Return the names of the layers of a unit that are stored as codes."""
        return [name for name in self._stored if unit.part.holds(name)]

    def _parameters(self, unit: Unit) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of a unit, without those that are stored as codes."""
        for name, parameter in unit.parameters():
            if name.rpartition(".")[0] not in self._stored:
                yield name, parameter

    def _note_write(self, parameter: nn.Parameter) -> None:
        held = self._held.get(id(parameter))
        if held is not None:
            held.is_changed = True

    def forget_changes(self) -> None:
        """Return to the values of the source."""
        for held in self._held.values():
            held.is_changed = False
        self.release()
        self._scales.clear()
        self.scratch.clear()

    def refer(
        self,
        file: Path,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, torch.Tensor],
    ) -> None:
        """Read changed values from a file that has them, instead of writing them to the scratch.

        Args:
            file: The file, whose names are those that follow.
            parameters: Parameters by name, with the values of the file.
            scales: Scales of parameters by name, see ``Unit.scales``, with those of the file.
        """
        keys = {self._name_of(p, name): (name, p.data) for name, p in parameters.items()}
        kept = {name: scale for name, scale in scales.items() if scale.numel() > 1}
        self.scratch.refer(file, keys | {name: (name, scale) for name, scale in kept.items()})
        self._scales |= kept
        for parameter in parameters.values():
            if id(parameter) in self._held:
                self._held[id(parameter)].is_changed = False

    # ---- one unit ------------------------------------------------------------------------------

    def _watching(self) -> AbstractContextManager[None]:
        return record_writes(self._note_write)

    def _is_complete(self, unit: Unit) -> bool:
        return not any(self._is_absent(parameter) for _, parameter in self._parameters(unit))

    def _size_of(self, unit: Unit) -> int:
        stored = sum(self._stored[name].size(name) for name in self._stored_in(unit))
        return stored + sum(p.numel() * p.itemsize for _, p in self._parameters(unit))

    def _is_absent(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._held and is_placeholder(parameter)

    def _read(self, unit: Unit) -> None:
        self._drop_replaced(unit)
        parameters = [(self._name_of(p, name), p) for name, p in self._parameters(unit)]
        absent = [(name, p) for name, p in parameters if self._is_absent(p)]
        for _, parameter in parameters:
            self._held.setdefault(id(parameter), _Held(parameter)).units.add(unit.name)
        changed = self.scratch.read(name for name, _ in absent)
        readers = self._readers(unit)
        for name, parameter in absent:
            values = changed.get(name)
            if values is not None:
                values = aligned(values)
            else:
                values = readers.get(name, partial(self._read_one, name))()
                if name not in self._checked:
                    check_finite(name, values)
                    self._checked.add(name)
            parameter.data = values.to(self.device)
        self._load_scales(unit)
        for name in self._stored_in(unit):
            self._stored[name].fill(self._model, name, self.device)

    def _read_one(self, name: str) -> torch.Tensor:
        values = self._ahead.take(name)
        if values is None:
            return aligned(self.source.read([name])[name])
        self._checked.add(name)
        return values

    # ---- the unit after it ----------------------------------------------------------------------

    def _following(self, unit: Unit) -> Unit | None:
        """Return the unit that will probably be loaded next, None if it is resident or unknown."""
        name = self._next.get(unit.name, "") if self.reads_ahead else ""
        return None if name in self._sizes else self.units.get(name)

    def _room_ahead(self, unit: Unit) -> int:
        """Return the bytes that are left free for the unit after one that is loaded."""
        following = self._following(unit)
        if following is None or self._total <= self.limit:
            return 0
        size = self._size_of(following)
        return size if 3 * max(size, self._size_of(unit)) <= self.limit else 0

    def _read_ahead(self, unit: Unit) -> None:
        if self._last:
            self._next[self._last] = unit.name
        self._last, following = unit.name, self._following(unit)
        self._ahead.drop()
        taken = sum(self._sizes.values())
        if following is not None and taken + (size := self._size_of(following)) <= self.limit:
            self.peak = max(self.peak, taken + size)
            self._ahead.begin(self._needed(following))

    def _needed(self, unit: Unit) -> list[str]:
        """Return the names in the source of the values that a unit will be given."""
        wholes = {matrix.name: matrix.whole for matrix in _stacked(unit)}
        names = [self._name_of(p, name) for name, p in self._parameters(unit) if self._is_absent(p)]
        names = [wholes.get(name, name) for name in names if name not in self.scratch]
        return list(dict.fromkeys(names))

    def _drop_replaced(self, unit: Unit) -> None:
        """Release parameters that the unit has no more, such as experts that are stacked now."""
        present = {id(parameter) for _, parameter in self._parameters(unit)}
        for key, held in list(self._held.items()):
            if held.units == {unit.name} and key not in present:
                held.parameter.data = placeholder(held.parameter, self.device)
                del self._held[key]

    def _readers(self, unit: Unit) -> dict[str, Callable[[], torch.Tensor]]:
        """Return functions that read matrices of split experts, which the source has stacked."""
        parts: dict[str, _Parts] = {}
        readers: dict[str, Callable[[], torch.Tensor]] = {}
        for matrix in _stacked(unit):
            if matrix.whole not in parts:
                parts[matrix.whole] = _Parts(partial(self._read_one, matrix.whole), matrix.split)
            readers[matrix.name] = partial(parts[matrix.whole].take, matrix.place)
        return readers

    def _load_scales(self, unit: Unit) -> None:
        # Only what was released comes back: a new quantizer does not take the scales of an old one.
        places = {
            name: (quantizer, part)
            for name, quantizer, part in _scales(unit)
            if (scale := getattr(quantizer, part)) is not None
            and scale.numel() > 1
            and is_placeholder(scale)
        }
        for name, values in self.scratch.read(places).items():
            quantizer, part = places[name]
            self._scales[name] = values.to(self.device)
            setattr(quantizer, part, self._scales[name])

    def _name_of(self, parameter: nn.Parameter, name: str) -> str:
        """Return the first name of a parameter in the model as it was built, or its only one."""
        return self._originals.get(id(parameter), (name,))[0]

    def _drop(self, unit: Unit) -> None:
        parameters = {
            id(parameter): (name, parameter) for name, parameter in self._parameters(unit)
        }
        kept: dict[str, torch.Tensor] = {}
        leaving: list[nn.Parameter] = []
        for key, held in list(self._held.items()):
            if held.units == {unit.name}:
                leaving.append(held.parameter)
                if held.is_changed and key in parameters:
                    kept[self._name_of(held.parameter, parameters[key][0])] = held.parameter.data
        for key, (name, parameter) in parameters.items():
            # It took the place of another one since the unit was loaded.
            if key not in self._held and not is_placeholder(parameter):
                leaving.append(parameter)
                kept[name] = parameter.data
        scales = {
            name: (quantizer, part, scale)
            for name, quantizer, part in _scales(unit)
            if (scale := getattr(quantizer, part)) is not None and scale.numel() > 1
        }
        kept |= {n: s for n, (_, _, s) in scales.items() if s is not self._scales.get(n)}
        self.scratch.write(kept)
        for held in self._held.values():
            held.units.discard(unit.name)
        for parameter in leaving:
            self._held.pop(id(parameter), None)
            parameter.data = placeholder(parameter, self.device)
        for name, (quantizer, part, scale) in scales.items():
            self._scales.pop(name, None)
            setattr(quantizer, part, placeholder(scale, self.device))
        for name in self._stored_in(unit):
            self._stored[name].release(self._model, name)


def _scales(unit: Unit) -> Iterator[tuple[str, TensorQuantizer, str]]:
    """Iterate over (full name, quantizer, its attribute) of the scales of parameters."""
    for path, layer in unit.modules():
        if isinstance(layer, FakeQuantizedLayer):
            for tensor, quantizer in layer.parameter_quantizers().items():
                for part in PARTS:
                    yield f"{path}.{tensor}.{part}", quantizer, part


class _Matrix(NamedTuple):
    """A matrix or bias of an expert: its name, that of the stack, and its place in the stack."""

    name: str
    whole: str
    place: str
    split: Callable[[torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


def _stacked(unit: Unit) -> Iterator[_Matrix]:
    """Iterate over the matrices and biases of split experts."""
    for path, module in unit.modules():
        if isinstance(module, LinearExperts):
            for name, stack in module.stacks.items():
                for kind, ending in (("weight", ""), ("bias", "_bias")):
                    for place in stack.layer_names(module.num_experts):
                        own, whole = f"{path}.{place}.{kind}", f"{path}.{name}{ending}"
                        yield _Matrix(own, whole, place, stack.split)


def _successors(names: list[str]) -> dict[str, str]:
    """Return the member of a module list after each one: ``layers.0`` -> ``layers.1``."""
    return {
        a: b
        for a, b in pairwise(names)
        if a.rpartition(".")[0] == b.rpartition(".")[0] and b.rpartition(".")[2].isdecimal()
    }


class _Held:
    """A parameter with values.

    Attributes:
        parameter: The parameter.
        units: The resident units that it belongs to.
        is_changed: Whether its values are in no file.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.units: set[str] = set()
        self.is_changed = False


class _Parts:
    """The parts of a tensor, which is read when the first one is taken."""

    def __init__(
        self,
        read: Callable[[], torch.Tensor],
        split: Callable[[torch.Tensor], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        self._read, self._split = read, split
        self._parts: dict[str, torch.Tensor] | None = None

    def take(self, name: str) -> torch.Tensor:
        """Return a part, a view of the whole."""
        if self._parts is None:
            self._parts = dict(self._split(self._read()))
        return self._parts[name]


def is_placeholder(x: torch.Tensor) -> bool:
    """Whether a tensor is the result of ``placeholder``."""
    if x.numel() > 1:
        return x.untyped_storage().nbytes() == x.itemsize
    return not x.numel() or (x.is_floating_point() and bool(x.isnan()))


def placeholder(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the shape and type of another one that holds one element: NaN."""
    missing = torch.tensor(torch.nan if x.is_floating_point() else 0, device="cpu")
    return missing.to(device, x.dtype).expand(x.shape)
