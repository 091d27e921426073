"""``--device``: the device of a verb, or several that share its work. torch is imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.cli.console import wrong

if TYPE_CHECKING:
    import torch

_FLAG = "--device"
ALL = "all"


def pick_device(name: str) -> str:
    """Return the name of a device that torch can use.

    Args:
        name: Name of a device, or ``auto``: the accelerator of this machine, if it has one that
            computes in float64, else the CPU.

    Raises:
        typer.BadParameter: There is no such device.
    """
    import torch

    if "," in name or name == ALL:
        raise wrong(_FLAG, f"one device does this work, got {name}. Give one, such as cuda:0.")
    if name == "auto":
        is_there = torch.accelerator.is_available()
        accelerator = torch.accelerator.current_accelerator() if is_there else None
        return accelerator.type if accelerator and _has_float64(accelerator) else "cpu"
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except RuntimeError:
        raise wrong(_FLAG, f"{name} is no device of torch. Give cpu, cuda or auto.") from None
    if device.type != "cpu" and not module.is_available():
        raise wrong(_FLAG, "this machine has no GPU that torch can use. Give cpu or auto.")
    count = module.device_count()
    if (device.index or 0) >= count:
        kind = device.type
        raise wrong(_FLAG, f"there is no {name}. Give {kind}:0 to {kind}:{count - 1}, or auto.")
    return name


def _has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64, which some algorithms need."""
    import torch

    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def pick_devices(name: str) -> list[str]:
    """Return the names of the devices that share the work, several of which have numbers.

    Args:
        name: As in ``pick_device``; or several names with commas between them; or ``all``: every
            accelerator of this machine.

    Raises:
        typer.BadParameter: There is no such device, or they cannot share the work.
    """
    import torch

    if name == ALL:
        if not torch.accelerator.is_available():
            raise wrong(_FLAG, "this machine has no GPU that torch can use. Give cpu or auto.")
        kind = pick_device("auto")
        count = torch.get_device_module(kind).device_count() if kind != "cpu" else 0
        return [f"{kind}:{number}" for number in range(count)] if count > 1 else [kind]
    names = [pick_device(part.strip()) for part in name.split(",")]
    devices = [torch.device(each) for each in names]
    if len(devices) > 1:
        is_of_one_type = len({device.type for device in devices}) == 1
        is_distinct = len(set(devices)) == len(devices) and None not in {d.index for d in devices}
        if not is_of_one_type or not is_distinct or devices[0].type == "cpu":
            raise wrong(
                _FLAG,
                f"{name} cannot share the work. Give each GPU of one type once, with its number, "
                "such as cuda:0,cuda:1; or all. Processes of torchrun share the work on a CPU.",
            )
    return names
