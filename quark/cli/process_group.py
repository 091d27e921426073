"""The processes that ``torchrun`` starts: the first one speaks and writes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quark.cli import accelerators, console

if TYPE_CHECKING:
    import torch

TIMEOUT = timedelta(days=7)  # one process may evaluate for long; torchrun notices one that ends
PAUSE = 1.0  # seconds; when a process ends, torchrun ends the one that prints the reason
_FAILURES = "quark failures"

_store: Any = None  # shared by all processes of the run


def rank() -> int:
    """Return the number of this process, 0 without ``torchrun``."""
    return int(os.environ.get("RANK", "0")) if is_distributed() else 0


def is_distributed() -> bool:
    """Whether ``torchrun`` started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the processes that ``torchrun`` started; without it, do nothing.

    Processes other than the first one print nothing inside the context.

    Args:
        device: Value of ``--device``. Each process takes an accelerator of its own.

    Raises:
        typer.BadParameter: One accelerator is named, or this machine has fewer than processes.
    """
    global _store
    if not is_distributed():
        yield
        return
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # not all of its public names are typed
    _leave_others_free()
    kind = _kind_of(accelerators.pick_devices(device))
    _store, number, count = next(dist.rendezvous("env://"))
    console.out.quiet = console.err.quiet = number > 0
    try:
        options: dict[str, Any] = {"backend": "gloo"}
        if kind.type != "cpu":
            backend = dist.get_default_backend_for_device(kind.type)
            # With the device, the backend connects now: what fails does so before the work.
            options = {
                "backend": f"cpu:gloo,{kind.type}:{backend}",
                "device_id": _choose_accelerator(kind),
            }
        store = dist.PrefixStore("quark", _store)
        dist.init_process_group(
            **options, timeout=TIMEOUT, store=store, rank=number, world_size=count
        )
        yield
    finally:
        console.out.quiet = console.err.quiet = False
        if dist.is_initialized():
            dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until all processes are here.

    Raises:
        ProcessFailure: One of them failed before.
    """
    if is_distributed():
        from quark.torch.pipeline.processes import joined

        with joined():
            pass


def _kind_of(names: list[str]) -> torch.device:
    """Return the type of the devices of all processes, without a number.

    Raises:
        typer.BadParameter: Several devices are named.
    """
    import torch

    device = torch.device(names[0])
    if len(names) > 1:
        raise _takes_its_own(device)
    return device


def _takes_its_own(device: torch.device) -> Exception:
    """Return the error for devices that are named where each process takes one."""
    text = f"each process takes a device of its own. Give {device.type}."
    return console.wrong("--device", text)


def _leave_others_free() -> None:
    """Make the accelerator of this process the current one before anything is on another one.

    What a process asks of an accelerator takes some of its memory for as long as the process runs.
    """
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        module = torch.get_device_module(kind)
        module.set_device(_local_rank() % module.device_count())


def _local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _choose_accelerator(device: torch.device) -> torch.device:
    """Return the accelerator of this process, which becomes the current one of its type."""
    import torch

    if device.index is not None:
        raise _takes_its_own(device)
    own, module = _local_rank(), torch.get_device_module(device)
    if own >= module.device_count():
        raise console.wrong(
            "--nproc_per_node",
            f"this machine has {module.device_count()} devices of type {device.type}. Start one "
            "process for each, or give --device cpu.",
        )
    module.set_device(own)
    return torch.device(device.type, own)


def tells_errors() -> bool:
    """Whether this process is the one to print its error: the first one that failed.

    Before the processes are joined all of them have the same error, that of the arguments.
    """
    try:
        is_first = rank() == 0 if _store is None else _store.add(_FAILURES, 1) == 1
    except RuntimeError:  # the process that kept the store has ended
        return True
    if not is_first:
        time.sleep(PAUSE)
    return bool(is_first)
