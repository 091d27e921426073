"""The state of a model before it is changed, to which a failure restores it."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.activation_store import LIMIT, ActivationStore

CONTAINERS = (dict, OrderedDict, list, set)


class _Attributes(NamedTuple):
    """The attributes of an object, and the contents of those that are containers."""

    values: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, target: Any) -> _Attributes:
        values = dict(vars(target))
        copies = {k: v.copy() for k, v in values.items() if type(v) in CONTAINERS}
        return cls(values, copies)

    def restore(self, target: Any) -> None:
        """Restore all of them. Containers are the same objects as before: hooks refer to them."""
        for name, contents in self.contents.items():
            container = self.values[name]
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(
                contents
            )
        vars(target).clear()
        vars(target).update(self.values)


class _ParameterState(NamedTuple):
    """What a parameter refers to; its values are those of ``data``."""

    parameter: nn.Parameter
    data: torch.Tensor
    requires_grad: bool
    gradient: torch.Tensor | None

    def restore(self) -> None:
        data = self.parameter.data
        if data.data_ptr() != self.data.data_ptr() or data.shape != self.data.shape:
            self.parameter.data = self.data
        self.parameter.requires_grad_(self.requires_grad)
        self.parameter.grad = self.gradient


class ModelState:
    """Modules, attributes and values of a model, as they are when this object is made.

    References are kept of everything, copies only of buffers and of values before they change:
    in main memory up to a limit, then in temporary files. So the memory that this takes is that of
    the parameters that ``write_`` changes, at most ``limit``.

    Args:
        model: The model.
        limit: Bytes of values to hold in memory.
    """

    def __init__(self, model: nn.Module, limit: int = LIMIT) -> None:
        modules = list(model.modules())
        configs = {
            id(c): c for m in modules if hasattr(c := getattr(m, "config", None), "__dict__")
        }
        self._classes = [(module, type(module)) for module in modules]
        self._attributes = [(x, _Attributes.of(x)) for x in [*modules, *configs.values()]]
        self._parameters = [
            _ParameterState(p, p.data, p.requires_grad, p.grad) for p in model.parameters()
        ]
        self._store = ActivationStore(limit)
        self._tensors: list[torch.Tensor] = []  # by number in the store
        self._recorded: dict[int, nn.Parameter] = {}
        for buffer in model.buffers():
            if not buffer.is_meta and buffer.layout is torch.strided:
                self._keep(buffer.detach())

    def record(self, parameter: nn.Parameter) -> None:
        """Keep the values of a parameter before its first change."""
        if id(parameter) not in self._recorded:
            self._keep(parameter.data)
            self._recorded[id(parameter)] = parameter

    def _keep(self, values: torch.Tensor) -> None:
        self._store[len(self._tensors)] = values
        self._tensors.append(values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the model, bit for bit. This may be repeated after an interruption."""
        for module, kind in self._classes:
            module.__class__ = kind
        for target, attributes in self._attributes:
            attributes.restore(target)
        for state in self._parameters:
            state.restore()
        # Several may be views of one tensor: the last one changed is restored first.
        for number in reversed(range(len(self._tensors))):
            tensor, values = self._tensors[number], self._store[number]
            if not have_same_bits(tensor, values):
                tensor.copy_(values)

    def forget(self) -> None:
        """Release all values."""
        self._store.clear()


@contextmanager
def restored_on_failure(model: nn.Module) -> Iterator[Callable[[nn.Parameter], None]]:
    """Restore a model if the context is left by an exception, an interrupt included.

    Yields:
        A function that takes each parameter before its values are changed; see ``record_writes``.
    """
    residency = residency_of(model)
    if residency is not None:
        residency.release()
    state = ModelState(model)
    try:
        yield state.record if residency is None else _keep_nothing
    except BaseException as error:
        # Loops over blocks that were broken off would end when the traceback is freed, perhaps
        # long after this, and set the modes of modules once more: end them now.
        traceback.clear_frames(error.__traceback__)
        if residency is not None:
            residency.forget_changes()
        _restore(state)
        raise
    finally:
        state.forget()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore a model when the context is left, whatever happened inside.

    Values must not change. An interrupt meanwhile is raised when the model is restored.
    """
    residency = residency_of(model)
    if residency is not None:
        residency.release()
    state = ModelState(model)
    try:
        yield
    finally:
        if residency is not None:
            residency.release()
        interrupt = _restore(state)
        state.forget()
        if interrupt is not None:
            raise interrupt


def _keep_nothing(parameter: nn.Parameter) -> None:
    """Take the place of ``ModelState.record`` where the files have the original values."""


def _restore(state: ModelState) -> KeyboardInterrupt | None:
    """Restore a model completely. Return the last interrupt of the user meanwhile, if any."""
    interrupt = None
    while True:
        try:
            state.restore()
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            return interrupt


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type hold the same bits, NaN included."""
    first, second = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)
