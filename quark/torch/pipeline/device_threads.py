"""Several devices of one process that quantize one model together: a thread works for each.

A device is to the samples what a process is under ``torch.distributed``: its thread runs the leaves
that are its own through its copy of each block, and changes the layers that are dealt to it. So one
device and several give the same bits, as one process and several do::

    thread 0, device 0    leaves 0 2 4 6    layers 0 3    the model that was given
    thread 1, device 1    leaves 1 3 5 7    layers 1 2    a copy

The blocks of a model may lie on several devices. What thread 0 has on device d, thread t has on
device d + t; the first device follows the last one. So a block is on another device in each thread.

Threads overlap although Python runs one of them at a time: one that waits for its device lets the
others launch. A tensor changes hands when all work on it is done, whatever the streams of the
threads.
"""

from __future__ import annotations

import contextvars
import json
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from quark.torch.pipeline.kept_records import kept_records
from quark.torch.pipeline.processes import Header, Processes, ProcessFailure, State, working_in

T = TypeVar("T")
_PAUSE = 0.5  # seconds between looks for an interrupt, which some systems only then deliver


class Meeting:
    """The place where threads exchange values.

    Attributes:
        failures: What ended threads, in the order of time.
    """

    def __init__(self, count: int) -> None:
        self.failures: list[BaseException] = []
        self._count = count
        self._changed = threading.Condition()
        self._laid: list[Any] = []  # what the threads lay down, in the order of arrival
        self._taken: list[Any] = []  # the same of the last complete round, by number of the thread
        self._round = 0
        self._mail: dict[tuple[int, int], State] = {}  # (source, target) -> tensors

    def fail(self, error: BaseException) -> None:
        """End the exchange: threads that wait, or will, get an error."""
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all threads by their numbers, when all have given one."""
        with self._changed:
            own = self._round
            self._laid.append((rank, value))
            if len(self._laid) == self._count:
                self._taken = [v for _, v in sorted(self._laid, key=lambda entry: entry[0])]
                self._laid, self._round = [], own + 1
                self._changed.notify_all()
            self._wait_for(lambda: self._round > own)
            return self._taken

    def give(self, source: int, target: int, state: State) -> None:
        """Give tensors to a thread, and return when it has copied them."""
        with self._changed:
            self._mail[source, target] = state
            self._changed.notify_all()
            self._wait_for(lambda: (source, target) not in self._mail)

    def take(self, source: int, target: int, copy: Callable[[State], State]) -> State:
        """Return a copy of the tensors that a thread gives."""
        with self._changed:
            self._wait_for(lambda: (source, target) in self._mail)
            state = self._mail[source, target]
        copied = copy(state)
        with self._changed:
            del self._mail[source, target]
            self._changed.notify_all()
        return copied

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: condition() or self.failures, _PAUSE):
            pass
        if not condition():
            self.check_failures()

    def check_failures(self) -> None:
        """Raise if a thread has failed."""
        for first in self.failures[:1]:
            raise ProcessFailure(f"Another device failed: {type(first).__name__}: {first}")


class DeviceThreads(Processes):
    """The devices of a run, as the thread of one of them sees them.

    Args:
        rank: Number of the thread.
        devices: The devices.
        meeting: Where the threads meet.
    """

    are_threads = True

    def __init__(self, rank: int, devices: Sequence[torch.device], meeting: Meeting) -> None:
        super().__init__(rank, len(devices))
        self._devices, self._meeting = devices, meeting

    def check_others(self) -> None:
        """Raise if another thread has failed, or the run is interrupted.

        Raises:
            ProcessFailure: It has.
        """
        self._meeting.check_failures()

    def send(self, state: State, header: Header, source: int, target: int) -> State:
        """Return the tensors of thread ``source`` in thread ``target``, on its devices."""
        if source == target or self.rank not in (source, target):
            return state
        if self.rank == target:
            return self._meeting.take(source, target, partial(self._copy, source))
        _finish(state)
        self._meeting.give(source, target, state)
        return state

    def broadcast(self, state: State, header: Header, source: int) -> State:
        """Return the tensors of one thread in all of them, each on its devices; see ``send``."""
        if self.rank == source:
            _finish(state)
        given: State = self._meeting.gather(self.rank, state)[source]
        copied = state if self.rank == source else self._copy(source, given)
        self._meeting.gather(self.rank, None)  # the source may change them from here on
        return copied

    def _exchange(self, message: dict[str, Any]) -> list[Any]:
        # Through JSON as between processes: no thread has an object of another one.
        values = self._meeting.gather(self.rank, json.dumps(message))
        return [json.loads(value)["value"] for value in values]

    def _copy(self, source: int, state: State) -> State:
        """Return copies of the tensors of a thread on the devices that are those of this thread."""
        steps = self.rank - source
        copies = [
            None if x is None else x.to(device_after(x.device, steps, self._devices), copy=True)
            for x in state
        ]
        _finish(copies)  # copies are launched on the device of the source
        return copies


def device_after(device: torch.device, steps: int, devices: Sequence[torch.device]) -> torch.device:
    """Return the device some steps after another one in a list, which begins again at its end.

    Devices that are not in the list, such as the CPU, stay what they are.
    """
    if device not in devices:
        return device
    return devices[(devices.index(device) + steps) % len(devices)]


def _finish(state: State) -> None:
    """Wait until the work on tensors is done."""
    for device in {x.device for x in state if x is not None}:
        torch.get_device_module(device).synchronize(device)


def run_on_devices(devices: Sequence[torch.device], work: Callable[[int], T]) -> T:
    """Call a function for each device, all at the same time, and return what the first one gives.

    Inside, ``processes`` returns the devices, and the device is the current one of its type.

    Args:
        devices: The devices, of one type, each with its number.
        work: Takes the place of a device in the list.

    Raises:
        BaseException: What a call raised first, when all have ended.
    """
    module = torch.get_device_module(devices[0])
    for device in devices:
        # Torch loads its linear algebra on the first use, which threads must not do together.
        torch.linalg.cholesky(torch.eye(1, device=device, dtype=torch.float32))
        module.synchronize(device)  # threads do not know the streams of this one
    meeting = Meeting(len(devices))
    results: dict[int, T] = {}
    has_gradients = torch.is_grad_enabled()

    def run(rank: int) -> None:
        group = DeviceThreads(rank, devices, meeting)
        try:
            module.set_device(devices[rank])
            with (
                working_in(group),
                torch.set_grad_enabled(has_gradients),
                kept_records(not group.is_first),
            ):
                results[rank] = work(rank)
                group.exchange(None)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # ends loops over blocks now
            meeting.fail(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=str(device))
        for rank, device in enumerate(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        _join(thread, meeting)
    for device in devices:
        module.synchronize(device)
    if meeting.failures:
        raise meeting.failures[0]
    return results[0]


def _join(thread: threading.Thread, meeting: Meeting) -> None:
    """Wait for a thread; an interrupt ends all of them at the next batch, layer or exchange."""
    while thread.is_alive():
        try:
            thread.join(_PAUSE)
        except BaseException as error:  # whatever a handler of a signal raises
            meeting.fail(error)
