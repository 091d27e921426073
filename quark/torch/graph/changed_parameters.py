"""Parameters that a model changes in place while it runs, found without values.

Example: RWKV divides two weights of each block by a power of two in its first pass in evaluation
mode, and multiplies them again in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quark.torch.graph.bare_copy import bare_copy
from quark.torch.graph.trace import written_arguments

# An embedding with ``max_norm`` rescales the rows that it reads. A quantized one does so on a copy.
_RESCALES_ROWS = torch.ops.aten.embedding_renorm_.default


def find_changed_parameters(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, str]:
    """Return the parameters that a pass in evaluation mode changes in place.

    A copy of the model on the meta device runs in training mode first, which may undo the change of
    an earlier pass. An error ends a run: operations that depend on values are not followed.

    Args:
        model: A float model; its parameters need no values. It is not changed.
        run: Runs a model once, with tensors on the meta device.

    Returns:
        Names of parameters -> the operations that change them.
    """
    with suppress(Exception):  # a model that cannot be copied is not checked
        empty = _without_values(model)
        recorder = _Recorder(empty)
        for is_training in (True, False):
            empty.train(is_training)
            recorder.changed.clear()
            with suppress(Exception), torch.no_grad(), torch.random.fork_rng([]), recorder:
                run(empty)
        return recorder.changed
    return {}


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    return bare_copy(model, {id(tensor): _empty(tensor) for tensor in _tensors(model.modules())})


def _tensors(modules: Iterable[nn.Module]) -> Iterable[torch.Tensor]:
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which operations write to the memory of which parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changed: dict[str, str] = {}
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _RESCALES_ROWS:
            for tensor in written_arguments(func, args, kwargs):
                name = self._names.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    self.changed[name] = str(func)
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is imported, which takes seconds
