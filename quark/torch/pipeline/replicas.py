"""Copies of a model for other devices: of one in memory with its values, of a larger one without.

A model larger than memory is read from its files by each device, block by block, and what a pass
changes there lies in scratch files of that device.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from quark.torch.graph.residency import ATTRIBUTE, residency_of
from quark.torch.pipeline.device_threads import device_after, run_on_devices
from quark.torch.pipeline.memory_limit import MemoryLimit, divide_memory, free_on_device
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch

T = TypeVar("T")


def run_on_replicas(
    model: nn.Module, devices: Sequence[torch.device], work: Callable[[nn.Module], T]
) -> T:
    """Call a function with a model and with its copies on other devices; see ``run_on_devices``.

    Args:
        model: The model, on one or several of the devices; see ``check_devices``.
        devices: The devices.
        work: Takes the model, or a copy.

    Raises:
        TypeError: A module cannot be copied.
    """
    models = [replicate(model, devices, rank) for rank in range(1, len(devices))]
    models.insert(0, model)
    try:
        return run_on_devices(devices, lambda rank: work(models[rank]))
    finally:
        for residency in filter(None, map(residency_of, models[1:])):
            residency.forget_changes()  # gives memory and scratch files free now


def check_devices(devices: Sequence[torch.device], model: nn.Module) -> None:
    """Check that devices can share the work on a model.

    Raises:
        ValueError: They are of several types or there twice, this machine lacks one, or the model
            lies elsewhere or is too large for copies.
    """
    names = ", ".join(map(str, devices))
    types = {device.type for device in devices}
    if len(types) > 1 or types & {"cpu", "meta"}:
        raise ValueError(
            f"devices: {names} cannot share the work. Give several devices of one type, such as "
            "cuda:0 and cuda:1; on a CPU, start several processes with torchrun."
        )
    (kind,) = types
    count = torch.get_device_module(kind).device_count()
    numbers = [device.index for device in devices]
    if None in numbers or len(set(numbers)) < len(numbers) or max(numbers) >= count:
        raise ValueError(
            f"devices: got {names}. Give each device once, with its number: {kind}:0 to "
            f"{kind}:{count - 1} on this machine."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"devices: {names} in a process group. Each process takes a device of its own: "
            "start one process for each, and leave devices out."
        )
    places = {_place_of(model)} if residency_of(model) else {p.device for p in model.parameters()}
    if not places <= set(devices):
        raise ValueError(
            f"devices: the model lies on {' and '.join(sorted(map(str, places)))}. Put it on "
            f"{devices[0]}; the other devices get copies of it."
        )
    if residency_of(model) is None:
        _check_room(devices, model)


def _place_of(model: nn.Module) -> torch.device:
    """Return the device, with its number, to which a model larger than memory is brought."""
    residency: Any = residency_of(model)
    device: torch.device = residency.device
    if device.index is None and device.type != "cpu":
        module = torch.get_device_module(device)
        return torch.device(device.type, module.current_device())
    return device


def _check_room(devices: Sequence[torch.device], model: nn.Module) -> None:
    """Check that devices have room for the copies of a model.

    Raises:
        ValueError: One has too little.
    """
    sizes: Counter[torch.device] = Counter()
    for x in {id(x): x for x in _tensors(model)}.values():
        for steps in range(1, len(devices)):
            sizes[device_after(x.device, steps, devices)] += x.numel() * x.itemsize
    for device in devices:
        free = free_on_device(device)
        if free is not None and sizes[device] > free:
            raise ValueError(
                f"devices: copies of the model take {sizes[device] / 1e9:.1f} GB of {device}, "
                f"which has {free / 1e9:.1f} GB free. Load the model in parts (max_memory)."
            )


def replicate(model: nn.Module, devices: Sequence[torch.device], rank: int) -> nn.Module:
    """Return the copy of a model for a thread; see ``device_threads`` for where its parts lie.

    Tied parameters stay tied. Of a model larger than memory the copy is one too.

    Args:
        model: The model.
        devices: The devices.
        rank: Number of the thread.

    Raises:
        TypeError: A module cannot be copied.
    """
    residency: Any = residency_of(model)
    memo: dict[int, Any] = {}
    if residency is not None:
        if not isinstance(residency, Residency):
            raise TypeError("The model is quantized: give a float model.")
        residency.release()
        memo[id(residency)] = None
    for x in _tensors(model):
        if id(x) not in memo:
            place = device_after(x.device, rank, devices)
            memo[id(x)] = _copy(x, place, residency is not None)
    try:
        replica = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied to other devices ({error}): give one device."
        ) from error
    if residency is not None:
        _read_by_itself(replica, residency, device_after(_place_of(model), rank, devices))
    _move_hooks(replica, devices, rank)
    return replica


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over parameters, buffers and other tensors of the modules of a model."""
    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            yield from (x for x in values.values() if isinstance(x, torch.Tensor))


def _copy(x: torch.Tensor, device: torch.device, is_empty: bool) -> torch.Tensor:
    """Return a copy of a tensor; that of a parameter may be a placeholder."""
    if not isinstance(x, nn.Parameter):
        return x.detach().to(device, copy=True)
    like = torch.zeros((), dtype=x.dtype, device=device).expand(x.shape) if is_empty else x.detach()
    return nn.Parameter(like if is_empty else like.to(device, copy=True), x.requires_grad)


def _read_by_itself(replica: nn.Module, residency: Residency, device: torch.device) -> None:
    """Let a copy of a model larger than memory read its values, independent of the model."""
    for name in residency.units:
        module: Any = replica.get_submodule(name)
        module.forward = vars(module).pop("_old_forward")  # of the copy, without the reading
    vars(replica).pop(ATTRIBUTE)
    own = divide_memory(None, device)
    limit = MemoryLimit(min(residency.limit, own.weights), residency.activation_limit, own.room)
    Residency(replica, residency.source, limit, Scratch(), device, residency.place)


def _move_hooks(replica: nn.Module, devices: Sequence[torch.device], rank: int) -> None:
    """Let the hooks of accelerate, which dispatch a model, move inputs to where the copy lies."""
    for module in replica.modules():
        hook = vars(module).get("_hf_hook")
        for each in (hook, *getattr(hook, "hooks", ())):
            place = getattr(each, "execution_device", None)
            if place is not None:
                device = torch.device(devices[0].type, place) if type(place) is int else place
                each.execution_device = device_after(torch.device(device), rank, devices)
