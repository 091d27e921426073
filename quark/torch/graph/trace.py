"""Trace of one forward pass: the operations of torch that ran, linked by tensor numbers.

Example: ``relu(x * 2).sum()`` of an input x is recorded as

    name   inputs   outputs
    mul    1        2
    relu   2        3
    sum    3        4
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from quark.torch.graph.block_selection import (
    BlockCall,
    enclosing_block,
    list_members,
    select_blocks,
)
from quark.torch.graph.float_products import native_products

_ViewKey = tuple[Any, ...]  # storage, offset, shape, stride, dtype
# Name of a recorded operation that torch does not have: a base tensor changed because one of its
# views was written to. Its arguments: base, view, where the view lies in the base.
VIEW_WRITE = "view_write"


class Value(NamedTuple):
    """A tensor of the pass. A tensor that is written to gets a new number.

    Attributes:
        number: Identifies the content: views of one memory with one shape and stride share it.
        shape: Shape of the tensor.
        content: The tensor itself if it holds integers or booleans (indices, masks), else None.
    """

    number: int
    shape: torch.Size
    content: torch.Tensor | None


class Op(NamedTuple):
    """An operation of the pass.

    Attributes:
        name: Name of the operation, without the trailing underscore of in-place operations.
        func: The operation.
        args: Positional arguments, tensors as `Value`.
        kwargs: Keyword arguments, tensors as `Value`.
        inputs: The tensors among the arguments.
        outputs: The tensors that the operation returned or wrote to.
        module: Name of the innermost module that ran the operation.
        block: Name of the block that ran it, empty outside of blocks.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    module: str
    block: str

    @property
    def location(self) -> str:
        """Where the operation ran, for messages."""
        return f"in {self.module}" if self.module else "in the model itself"

    @property
    def is_empty(self) -> bool:
        """Whether all outputs are empty tensors, as in experts without tokens."""
        return bool(self.outputs) and not any(v.shape.numel() for v in self.outputs)


class ModuleRun(NamedTuple):
    """How a module ran in the pass.

    Attributes:
        calls: How often.
        maps_tensor: Whether its first argument was a tensor of floats, and its output a tensor.
    """

    calls: int
    maps_tensor: bool


@dataclass
class Trace:
    """Record of one forward pass.

    Attributes:
        ops: Operations in the order of execution.
        parameters: Number -> name, of the parameters that were read.
        results: Numbers of the tensors that the model returned.
        blocks: Decoder block -> its calls, in the order of execution.
        runs: Module -> how it ran, in the order in which modules began.
    """

    ops: list[Op] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    results: set[int] = field(default_factory=set)
    blocks: dict[str, list[BlockCall]] = field(default_factory=dict)
    runs: dict[str, ModuleRun] = field(default_factory=dict)


def trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Record one forward pass.

    The trace holds the inputs and outputs of blocks, indices and masks. Use a short input.

    Args:
        model: The model. It is not changed.
        run: Runs the model once.
    """
    record = _record(model, run, _Recorder(model))
    record.ops = _drop_unread_writes(record.ops)
    return record


def trace_blocks(model: nn.Module, run: Callable[[], object]) -> dict[str, list[BlockCall]]:
    """Return the blocks that run in one forward pass, with their calls; see ``Trace.blocks``.

    Operations are not recorded. A trace of them holds every tensor of integers, such as the
    unpacked codes of all weights: that takes as much memory as the model in float.

    Args:
        model: The model. It is not changed.
        run: Runs the model once.
    """
    return _record(model, run, _Recorder(model, records_ops=False)).blocks


def _record(model: nn.Module, run: Callable[[], object], recorder: _Recorder) -> Trace:
    with native_products(), ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(recorder.hooked(name, module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        run()
    recorder.select_blocks(model)
    return recorder.trace


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested lists, tuples and mappings."""
    for leaf in tree_leaves(dict(tree) if isinstance(tree, dict) else tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers tensors by their place in memory: storage, offset, shape, stride and type.

    Views with equal ones get one number. A copy gets a new number.

    Args:
        model: The model.
        records_ops: Whether to record the operations, with the content of their indices.
    """

    def __init__(self, model: nn.Module, records_ops: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._records_ops = records_ops
        self._members = list_members(model)
        self._reshaping: set[str] = set()  # members that changed the shape
        self._names = {_view_key(p): n for n, p in model.named_parameters()}
        self._ids = {id(p): n for n, p in model.named_parameters()}  # their memory may change
        self._running = [""]
        self._blocks = [""]
        self._count = 0
        self._views: dict[int, dict[_ViewKey, int]] = defaultdict(dict)  # storage -> numbers
        # A weak reference keeps the address of a freed storage from being used again. Without it,
        # a new tensor at the same address would be taken for the freed one.
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._records_ops:
            out = func(*args, **kwargs)
            for tensor in written_arguments(func, args, kwargs):
                self._renumber_views(tensor)
            return out
        values, named_values = tree_map(self._value, (args, kwargs))
        inputs = tuple(v for v in _leaves((values, named_values)) if isinstance(v, Value))
        out = func(*args, **kwargs)
        written = list(written_arguments(func, args, kwargs))
        stale = [write for tensor in written for write in self._renumber_views(tensor)]
        results = tuple(self._value(t) for t in [*iter_tensors(out), *written])
        # An operation that returns its input unchanged (a view of all elements) is left out.
        if not results or {v.number for v in results} - {v.number for v in inputs}:
            name = func._schema.name.split("::")[-1]
            name = name.removesuffix("_") if written else name
            self._record(name, func, values, named_values, inputs, results)
        for old, new, view, region in stale:
            self._record(VIEW_WRITE, func, (old, view, region), {}, (old, view), (new,))
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is imported, which takes seconds

    def _record(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> None:
        module, block = self._running[-1], self._blocks[-1]
        self.trace.ops.append(Op(name, func, args, kwargs, inputs, outputs, module, block))

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage, key = leaf.untyped_storage(), _view_key(leaf)
        numbers = self._views[storage._cdata]
        if key not in numbers:
            if storage._cdata not in self._storages:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = weak
            self._count += 1
            numbers[key] = self._count
            name = self._names.get(key) or self._ids.get(id(leaf))
            if name is not None:
                self.trace.parameters[self._count] = name
        is_index = not (leaf.is_floating_point() or leaf.is_complex())
        return Value(numbers[key], leaf.shape, leaf if is_index else None)

    def _numbers(self, tree: Any) -> tuple[int, ...]:
        return tuple(self._value(t).number for t in iter_tensors(tree))

    def _renumber_views(self, tensor: torch.Tensor) -> list[tuple[Value, Value, Value, _ViewKey]]:
        """Give new numbers to all views of the storage of a tensor that was written to.

        Example: ``whole[:, :2] = y`` writes to a view. ``whole`` keeps its memory, but has other
        content now: it gets a new number, recorded as the output of a `VIEW_WRITE` of the old
        number and of y.

        Returns:
            For each other view of the storage: its old value, its new value, the tensor, and
            (stride of the view, shape, stride and offset of the tensor in it).
        """
        numbers, written = self._views[tensor.untyped_storage()._cdata], _view_key(tensor)
        renumbered = []
        for key, number in list(numbers.items()):
            self._count += 1
            numbers[key] = self._count
            if key != written:
                renumbered.append((key, Value(number, key[2], None), self._count))
        view = self._value(tensor)
        writes = []
        for key, old, number in renumbered:
            region = (tensor.shape, tensor.stride(), tensor.storage_offset() - key[1])
            writes.append((old, Value(number, key[2], None), view, (key[3], *region)))
        return writes

    def select_blocks(self, model: nn.Module) -> None:
        """Keep the blocks among the members of lists that ran."""
        trace = self.trace
        names = select_blocks(model, trace.blocks, self._reshaping)
        home = {member: enclosing_block(member, names) for member in {op.block for op in trace.ops}}
        trace.blocks = {name: trace.blocks[name] for name in names}
        trace.ops = [op._replace(block=home[op.block]) for op in trace.ops]

    @contextmanager
    def hooked(self, name: str, module: nn.Module) -> Iterator[None]:
        """Record when a module runs, the calls of blocks, and the output of the whole model."""
        entered: list[tuple[int, ...]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            before = self.trace.runs.get(name, ModuleRun(0, True))
            self.trace.runs[name] = before._replace(calls=before.calls + 1)
            if name in self._members:
                self._blocks.append(name)
                entered.append(self._numbers((args, kwargs)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            if not _maps_tensor(args, kwargs, output):
                self.trace.runs[name] = self.trace.runs[name]._replace(maps_tensor=False)
            if name in self._members:
                self._blocks.pop()
                inputs = entered.pop()
                if _preserves_shape(args, kwargs, output):
                    call = BlockCall(args, kwargs, output, inputs, self._numbers(output))
                    self.trace.blocks.setdefault(name, []).append(call)
                else:
                    self._reshaping.add(name)
            if not name:
                self.trace.results.update(self._numbers(output))

        handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _drop_unread_writes(ops: list[Op]) -> list[Op]:
    """Remove the `VIEW_WRITE` operations whose output no later operation reads."""
    read: set[int] = set()
    kept = []
    for op in reversed(ops):
        if op.name != VIEW_WRITE or op.outputs[0].number in read:
            read.update(v.number for v in op.inputs)
            kept.append(op)
    return kept[::-1]


def _view_key(tensor: torch.Tensor) -> _ViewKey:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _leaves(tree: Any) -> list[Any]:
    return tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Value))[0]


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that an operation writes to, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from iter_tensors(args[index] if index < len(args) else kwargs.get(argument.name))


def _maps_tensor(args: Any, kwargs: Any, output: Any) -> bool:
    """Whether the first argument of a call is a tensor of floats, and the output a tensor."""
    x = next(iter([*args, *kwargs.values()]), None)
    return isinstance(x, torch.Tensor) and x.is_floating_point() and torch.is_tensor(output)


def _preserves_shape(args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a tensor of the output has the shape of the first tensor of the arguments.

    Blocks of two streams, such as text and image, may return the other one first.
    """
    x = next(iter_tensors((args, kwargs)), None)
    return x is not None and any(x.shape == y.shape for y in iter_tensors(output))
