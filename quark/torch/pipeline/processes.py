"""The processes that quantize one model together, under ``torch.distributed``.

Every process has the whole model and runs a part of the data. Inside of ``joined`` the processes
exchange sums and rounded layers; elsewhere each process works alone. Several devices of one process
are such processes too: a thread works for each of them (``device_threads``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
State = Sequence[torch.Tensor | None]  # tensors of an object, in a fixed order
Header = list[tuple[list[int], str, str] | None]  # shape, dtype and device type of each


class ProcessFailure(RuntimeError):
    """Another process of the run failed or ended."""


class Processes:
    """The processes of a run, as one of them sees them.

    All processes call ``exchange``, ``send`` and ``broadcast`` in the same order. An error of one
    process is an error of all: it is part of the next exchange.

    Args:
        rank: Number of this process.
        count: Number of processes.

    Attributes:
        is_first: Whether this process is the one that logs and writes.
        are_threads: Whether they are threads of one process, each with a device of its own.
    """

    are_threads = False

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.is_first = rank == 0
        self._is_sending = False

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their numbers.

        Args:
            value: Data of JSON: floats keep their bits, keys become strings.

        Raises:
            ProcessFailure: A process failed.
        """
        return [value] if self.count == 1 else self._exchange({"value": value})

    def measure(self, items: Sequence[T], function: Callable[[T], float]) -> list[float]:
        """Return the value of a function for each item; each process computes a part of them."""
        own = range(self.rank, len(items), self.count)
        values = self.exchange([function(items[index]) for index in own])
        return [values[i % self.count][i // self.count] for i in range(len(items))]

    def report(self, error: Exception) -> None:
        """Tell the others that this process failed, if they are about to exchange values."""
        if self.count > 1 and not self._is_sending and not isinstance(error, ProcessFailure):
            with suppress(ProcessFailure):  # the others may have failed too
                self._exchange({"error": f"{type(error).__name__}: {error}"})

    def check_others(self) -> None:
        """Raise if another process is known to have failed, so that long work ends soon.

        Raises:
            ProcessFailure: It has. Processes of ``torch.distributed`` learn that in exchanges only.
        """

    def send(self, state: State, header: Header, source: int, target: int) -> State:
        """Return the tensors of process ``source`` in process ``target``.

        Args:
            state: The tensors, where this process is the source.
            header: ``describe`` of them, in both processes. Other processes do nothing.
            source: Number of the process that has the tensors.
            target: Number of the process that needs them.
        """
        if source == target or self.rank not in (source, target):
            return state
        if self.rank == source:
            with self._connection():
                for tensor in state:
                    if tensor is not None:
                        dist.send(_to_wire(tensor), target)
            return state
        return self._receive(header, lambda x: dist.recv(x, source))

    def broadcast(self, state: State, header: Header, source: int) -> State:
        """Return the tensors of one process in all of them; see ``send``."""
        if self.count == 1:
            return state
        if self.rank == source:
            with self._connection():
                for tensor in state:
                    if tensor is not None:
                        dist.broadcast(_to_wire(tensor), source)
            return state
        return self._receive(header, lambda x: dist.broadcast(x, source))

    def _receive(self, header: Header, receive: Any) -> State:
        tensors: list[torch.Tensor | None] = []
        with self._connection():
            for entry in header:
                if entry is None:
                    tensors.append(None)
                    continue
                shape, dtype, device = entry
                x = torch.empty(shape, dtype=getattr(torch, dtype), device=_local(device))
                wire = _to_wire(x)
                receive(wire)
                tensors.append(wire.to(x.device).view(x.dtype).view(x.shape))
        return tensors

    def _exchange(self, message: dict[str, Any]) -> list[Any]:
        device = _wire_device(torch.device("cpu"))
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._connection():
            sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(data)], device=device))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8, device=device)
            padded[: len(data)] = data
            buffers = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(buffers, padded)
        texts = [
            bytes(buffer[: int(size)].tolist()) for buffer, size in zip(buffers, sizes, strict=True)
        ]
        messages = [json.loads(text) for text in texts]
        for number, other in enumerate(messages):
            if "error" in other and number != self.rank:
                raise ProcessFailure(f"Process {number} of {self.count} failed: {other['error']}")
        return [other.get("value") for other in messages]

    @contextmanager
    def _connection(self) -> Iterator[None]:
        self._is_sending = True  # until the end: an error inside breaks the order of calls
        try:
            yield
        except RuntimeError as error:
            raise ProcessFailure(
                f"The {self.count} processes of this run lost contact ({error}). If the system "
                "ended one of them, the memory may have been too small: start fewer processes."
            ) from error
        self._is_sending = False


ALONE = Processes()
_processes: ContextVar[Processes] = ContextVar("processes", default=ALONE)


def processes() -> Processes:
    """Return the processes that work together here: one outside of ``joined``."""
    return _processes.get()


@contextmanager
def joined() -> Iterator[Processes]:
    """Let the processes of ``torch.distributed`` work together inside the context.

    Without an initialized process group, this process works alone. A thread of a device works with
    those of the other devices already.

    Raises:
        ProcessFailure: Another process failed inside the context.
    """
    if processes().are_threads:
        yield processes()
        return
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield ALONE
        return
    group = Processes(dist.get_rank(), dist.get_world_size())
    with working_in(group):
        try:
            yield group
            group.exchange(None)
        except Exception as error:
            group.report(error)
            raise


@contextmanager
def working_in(group: Processes) -> Iterator[None]:
    """Let this thread work as one of the processes of a group inside the context."""
    token = _processes.set(group)
    try:
        yield
    finally:
        _processes.reset(token)


def alone() -> AbstractContextManager[None]:
    """Return a context in which this process runs all data itself."""
    own = Processes()
    own.is_first = processes().is_first
    return working_in(own)


def describe(state: State) -> Header:
    """Return shape, dtype and device type of tensors."""
    return [
        None if x is None else (list(x.shape), str(x.dtype).removeprefix("torch."), x.device.type)
        for x in state
    ]


def _local(device: str) -> torch.device:
    """Return the device of a type that this process works on."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, torch.get_device_module(device).current_device())


def _to_wire(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on a device from which they can be sent."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.to(_wire_device(x.device))


def _wire_device(device: torch.device) -> torch.device:
    """Return the device itself if the process group sends from it, else one from which it does."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    if device.type == "cpu" and "gloo" not in backends.values():
        return _local(next(name for name in backends if name != "cpu"))
    return torch.device("cpu") if backends.get(device.type) in (None, "gloo") else device
