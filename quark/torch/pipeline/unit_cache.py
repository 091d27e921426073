"""Units of a model: loaded when they are used, the least recently used ones released."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from quark.torch.graph.residency import ATTRIBUTE, Part
from quark.torch.pipeline.allocator import keep_holes_small, return_free_memory
from quark.torch.pipeline.memory_limit import MemoryLimit


class Unit(NamedTuple):
    """Parameters that come and go together: those of a block, or of a module around the blocks.

    Attributes:
        name: Name of the module.
        module: The module.
        is_whole: Whether parameters of modules inside belong to it.
    """

    name: str
    module: nn.Module
    is_whole: bool

    def concerns(self, name: str) -> bool:
        """Whether a module or parameter of this name lies in the unit, is it, or holds it."""
        if not name or name == self.name or self.name.startswith(f"{name}."):
            return True
        if not self.is_whole:
            return name.rpartition(".")[0] == self.name
        return not self.name or name.startswith(f"{self.name}.")

    @property
    def part(self) -> Part:
        """The unit as others know it."""
        own = next(iter([*self.module._parameters, *self.module._buffers]), "")
        place = f"{self.name}." if self.name else ""
        return Part(self.name, self.is_whole, self.name if self.is_whole else f"{place}{own}")

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over (full name, module): the modules whose parameters belong to the unit."""
        if self.is_whole:
            yield from self.module.named_modules(prefix=self.name)
        else:
            yield self.name, self.module

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (full name, parameter); a parameter with several names is there once."""
        return self.module.named_parameters(self.name, recurse=self.is_whole)


def find_units(model: nn.Module) -> list[Unit]:
    """Return the units of a model: members of module lists, and the largest modules without lists.

    Example: ``embed_tokens``, ``layers.0``, ``layers.1``, ``norm``. A module around lists that
    holds parameters or stored buffers itself is a unit of these alone.
    """
    return list(_units_inside("", model))


def _units_inside(name: str, module: nn.Module) -> Iterator[Unit]:
    if not any(isinstance(m, nn.ModuleList) for m in module.modules()):
        if any(map(_stores, module.modules())):
            yield Unit(name, module, True)
        return
    if _stores(module):
        yield Unit(name, module, False)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not isinstance(module, nn.ModuleList):
            yield from _units_inside(path, child)
        elif any(map(_stores, child.modules())):
            yield Unit(path, child, True)


def _stores(module: nn.Module) -> bool:
    """Whether files have a tensor of a module itself."""
    stored = [v for n, v in module._buffers.items() if n not in module._non_persistent_buffers_set]
    return any(value is not None for value in [*module._parameters.values(), *stored])


class UnitCache(ABC):
    """Loads the units of a model when they are used, and releases the least recently used ones.

    Args:
        model: The model; it remembers this object, which is ``graph.residency.Residency``.
        limit: What may be resident. What is in use stays above it.
        device: Where units are brought to.

    Attributes:
        limit: Bytes of parameters that may be resident.
        activation_limit: Bytes of activations that passes over the model may hold in memory.
        room: Bytes of main memory for all work on the model; None if it lies on another device.
        peak: The most bytes that were resident.
    """

    def __init__(
        self,
        model: nn.Module,
        limit: MemoryLimit,
        device: torch.device | str = "cpu",
    ) -> None:
        keep_holes_small()
        self.limit, self.activation_limit, self.room = limit
        self.device = torch.device(device)
        self.units = {unit.name: unit for unit in find_units(model)}
        self.peak = 0
        self._sizes: dict[str, int] = {}  # resident unit -> bytes, the least recently used first
        self._pins: dict[str, int] = {}  # unit -> number of its users
        for unit in self.units.values():
            self._load_before_forward(unit)
        vars(model)[ATTRIBUTE] = self

    def parts(self) -> list[Part]:
        """Return the units as parts of the model, in its order."""
        return [unit.part for unit in self.units.values()]

    @property
    def largest(self) -> int:
        """Bytes of the largest unit."""
        return max(map(self._size_of, self.units.values()), default=0)

    @contextmanager
    def use(self, names: Collection[str]) -> Iterator[None]:
        """Keep parameters resident; see ``graph.residency.resident``."""
        units = [u for u in self.units.values() if any(map(u.concerns, names))]
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(self._in_use(unit))
            yield

    @contextmanager
    def _in_use(self, unit: Unit) -> Iterator[None]:
        self._pins[unit.name] = self._pins.get(unit.name, 0) + 1
        try:
            self._load(unit)
            with self._watching():
                yield
        finally:
            self._pins[unit.name] -= 1

    def _load_before_forward(self, unit: Unit) -> None:
        module: Any = unit.module
        # The name under which ``change_class`` looks for the forward of the class.
        module._old_forward = module.forward

        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._in_use(unit):
                return module._old_forward(*args, **kwargs)

        module.forward = forward

    def release(self, size: int | None = None) -> None:
        """Release units that are not in use, until so many bytes have room; all without a size."""
        before = len(self._sizes)
        for name in list(self._sizes):
            if size is not None and sum(self._sizes.values()) + size <= self.limit:
                break
            if not self._pins.get(name):
                self._drop(self.units[name])
                del self._sizes[name]
        if len(self._sizes) < before:
            return_free_memory()

    def _load(self, unit: Unit) -> None:
        if unit.name in self._sizes:
            self._sizes[unit.name] = self._sizes.pop(unit.name)  # the most recently used
            if self._is_complete(unit):
                return
        with _disable_current_modes(), torch.no_grad():  # a trace does not see this
            if unit.name not in self._sizes:
                size = self._size_of(unit)
                self.release(size + self._room_ahead(unit))
                return_free_memory()  # what the unit before took to unpack its weights
                self._sizes[unit.name] = size
                self.peak = max(self.peak, sum(self._sizes.values()))
                self._read(unit)
                self._read_ahead(unit)
                return
            self._read(unit)

    def _room_ahead(self, unit: Unit) -> int:
        """Return the bytes that are left free for what is read while a unit is in use."""
        return 0

    def _read_ahead(self, unit: Unit) -> None:  # noqa: B027
        """Begin to read what will probably be used after a unit that has been loaded."""

    def _watching(self) -> AbstractContextManager[None]:
        """Return a context that is open while a unit is in use."""
        return nullcontext()

    def _is_complete(self, unit: Unit) -> bool:
        """Whether a resident unit still has all values."""
        return True

    @abstractmethod
    def _size_of(self, unit: Unit) -> int:
        """Return the bytes that a unit takes when it is resident."""

    @abstractmethod
    def _read(self, unit: Unit) -> None:
        """Give a unit its values."""

    @abstractmethod
    def _drop(self, unit: Unit) -> None:
        """Take the values of a unit from memory."""
