"""Copies of a model for other devices: of one in memory with its values, of a larger one without.

A model larger than memory is read from its files by each device, block by block, and what a pass
changes there lies in scratch files of that device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from quark.torch.graph.residency import ATTRIBUTE, residency_of
from quark.torch.pipeline.device_threads import run_on_devices
from quark.torch.pipeline.memory_limit import MemoryLimit, divide_memory
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch

T = TypeVar("T")


def run_on_replicas(
    model: nn.Module, devices: Sequence[torch.device], work: Callable[[nn.Module], T]
) -> T:
    """Call a function with a model and with its copies on other devices; see ``run_on_devices``.

    Args:
        model: The model, on the first of the devices; see ``check_devices``.
        devices: The devices.
        work: Takes the model, or a copy.

    Raises:
        TypeError: A module cannot be copied.
    """
    models = [model, *(replicate(model, device) for device in devices[1:])]
    return run_on_devices(devices, lambda rank: work(models[rank]))


def check_devices(devices: Sequence[torch.device], model: nn.Module) -> None:
    """Check that devices can share the work on a model.

    Raises:
        ValueError: They are of several types or there twice, this machine lacks one, or the model
            does not lie on the first.
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
    residency = residency_of(model)
    places = {p.device for p in model.parameters()} if residency is None else {residency.device}
    own = {torch.device(p.type, p.index or 0) if p.type != "cpu" else p for p in places}
    if own != {devices[0]}:
        raise ValueError(
            f"devices: the model lies on {' and '.join(sorted(map(str, places)))}. Put it on "
            f"{devices[0]}, the first of the devices; they get copies of it."
        )


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on another device.

    Tied parameters stay tied. Of a model larger than memory the copy is one too.

    Args:
        model: The model, on one device.
        device: The device of the copy.

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
    home = next((p.device for p in model.parameters()), device)
    for x in _tensors(model):
        if x.device == home and id(x) not in memo:
            memo[id(x)] = _copy(x, device, residency is not None)
    try:
        replica = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied to {device} ({error}): give one device."
        ) from error
    if residency is not None:
        _read_by_itself(replica, residency, device)
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
