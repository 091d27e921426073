"""One forward pass, written down as the operations of torch it is made of."""

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

_Place = tuple[Any, ...]
WRITTEN_INTO = "write_into"


class Value(NamedTuple):
    """A tensor of the pass. What is written to gets a new number.

    Attributes:
        number: One number for one content: all views of the same elements in the same order.
        shape: Its shape.
        content: The tensor, of integers and booleans only: indices and masks.
    """

    number: int
    shape: torch.Size
    content: torch.Tensor | None


class Op(NamedTuple):
    """An operation of the pass.

    Attributes:
        name: Name of the operation, without the ending of operations that write in place.
        func: The operation.
        args: Its arguments, tensors as ``Value``.
        kwargs: Its keyword arguments, tensors as ``Value``.
        inputs: The tensors among both.
        outputs: The tensors it gave.
        module: The innermost module that ran it.
        block: The block it ran in, empty outside.
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
    def where(self) -> str:
        """Where the operation ran, in words."""
        return f"in {self.module}" if self.module else "in the model itself"

    @property
    def is_idle(self) -> bool:
        """Whether it made empty tensors only, as experts without tokens do."""
        return bool(self.outputs) and not any(v.shape.numel() for v in self.outputs)


class Call(NamedTuple):
    """What a module was called with and gave.

    Attributes:
        args: Arguments.
        kwargs: Keyword arguments.
        output: What it returned.
        given: Numbers of the tensors among both kinds of arguments.
        made: Numbers of the tensors that it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    given: tuple[int, ...]
    made: tuple[int, ...]


@dataclass
class Trace:
    """What happened in one forward pass.

    Attributes:
        ops: The operations in the order of execution.
        parameters: Number of a parameter -> its name, for the parameters that were read.
        results: Numbers of the tensors the model returned.
        blocks: Decoder block -> its calls, in the order of execution.
    """

    ops: list[Op] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    results: set[int] = field(default_factory=set)
    blocks: dict[str, list[Call]] = field(default_factory=dict)


def trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Write down one forward pass.

    What blocks get and give is kept, and so are indices and masks; a short input is best.

    Args:
        model: The model. It is not changed.
        run: Runs the model once.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(recorder.watched(name, module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        run()
    recorder.trace.ops = _without_idle_writes(recorder.trace.ops)
    return recorder.trace


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested lists, tuples and mappings."""
    for leaf in tree_leaves(dict(tree) if isinstance(tree, dict) else tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers tensors by where they lie, which is what a view and its origin have in common."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._members = _outermost_members(model)
        self._names = {_place(p): n for n, p in model.named_parameters()}
        self._inside = [""]
        self._blocks = [""]
        self._count = 0
        self._places: dict[int, dict[_Place, int]] = defaultdict(dict)  # storage -> numbers
        # What has a weak reference keeps its address when it is freed, so a place means a tensor.
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given, named = tree_map(self._value, (args, kwargs))
        inputs = tuple(v for v in _flat((given, named)) if isinstance(v, Value))
        out = func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        stale = [pair for tensor in written for pair in self._overwrite(tensor)]
        results = tuple(self._value(t) for t in [*tensors(out), *written])
        if not results or {v.number for v in results} - {v.number for v in inputs}:
            name = func._schema.name.split("::")[-1]
            name = name.removesuffix("_") if written else name
            self._record(name, func, given, named, inputs, results)
        for old, new, view, where in stale:
            self._record(WRITTEN_INTO, func, (old, view, where), {}, (old, view), (new,))
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
        where = self._inside[-1], self._blocks[-1]
        self.trace.ops.append(Op(name, func, args, kwargs, inputs, outputs, *where))

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage, place = leaf.untyped_storage(), _place(leaf)
        numbers = self._places[storage._cdata]
        if place not in numbers:
            if storage._cdata not in self._known:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._known[storage._cdata] = weak
            self._count += 1
            numbers[place] = self._count
            if place in self._names:
                self.trace.parameters[self._count] = self._names[place]
        is_index = not (leaf.is_floating_point() or leaf.is_complex())
        return Value(numbers[place], leaf.shape, leaf if is_index else None)

    def _numbers(self, tree: Any) -> tuple[int, ...]:
        return tuple(self._value(t).number for t in tensors(tree))

    def _overwrite(self, tensor: torch.Tensor) -> list[tuple[Value, Value, Value, _Place]]:
        """Give new numbers to what shares memory with a tensor that was written to.

        Returns:
            For each that is contiguous and may hold the tensor, what it was and is, the tensor,
            and where in it the tensor lies. Others are new: nothing is known of them.
        """
        numbers, written = self._places[tensor.untyped_storage()._cdata], _place(tensor)
        found = []
        for place, number in list(numbers.items()):
            self._count += 1
            numbers[place] = self._count
            if place != written:
                found.append((place, Value(number, place[2], None), self._count))
        view = self._value(tensor)
        made = []
        for place, old, number in found:
            where = (tensor.shape, tensor.stride(), tensor.storage_offset() - place[1])
            made.append((old, Value(number, place[2], None), view, (place[3], *where)))
        return made

    @contextmanager
    def watched(self, name: str, module: nn.Module) -> Iterator[None]:
        """Note when a module runs, the calls of blocks, and what the whole model returns."""
        entered: list[tuple[int, ...]] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(name)
            if name in self._members:
                self._blocks.append(name)
                entered.append(self._numbers((args, kwargs)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._inside.pop()
            if name in self._members:
                self._blocks.pop()
                given = entered.pop()
                if _keeps_shape(args, kwargs, output):
                    call = Call(args, kwargs, output, given, self._numbers(output))
                    self.trace.blocks.setdefault(name, []).append(call)
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


def _without_idle_writes(ops: list[Op]) -> list[Op]:
    """Leave out what became of views that nobody reads after what they show was written to."""
    read: set[int] = set()
    kept = []
    for op in reversed(ops):
        if op.name != WRITTEN_INTO or op.outputs[0].number in read:
            read.update(v.number for v in op.inputs)
            kept.append(op)
    return kept[::-1]


def _place(tensor: torch.Tensor) -> _Place:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _flat(given: Any) -> list[Any]:
    return tree_flatten(given, is_leaf=lambda leaf: isinstance(leaf, Value))[0]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors(given)


def _outermost_members(model: nn.Module) -> set[str]:
    """Return the members of the lists of modules that lie in no other such list."""
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return {
        f"{name}.{key}"
        for name in lists
        if not any(name.startswith(f"{other}.") for other in lists)
        for key, _ in model.get_submodule(name).named_children()
    }


def _keeps_shape(args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module turns the first tensor it gets into another of its shape."""
    given, made = next(tensors((args, kwargs)), None), next(tensors(output), None)
    return given is not None and made is not None and given.shape == made.shape
