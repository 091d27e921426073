"""Models larger than memory: their tensors are read from the files when they are used."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.torch.export.checkpoint.computed_buffers import check_buffers, compute_buffers
from quark.torch.export.checkpoint.float_model import report_unused
from quark.torch.export.checkpoint.float_source import (
    FloatSource,
    fill_with_placeholders,
    open_float_model,
)
from quark.torch.export.checkpoint.placement import put_tensor
from quark.torch.export.checkpoint.reader import Loading, Reader
from quark.torch.export.checkpoint.value_checks import check_values
from quark.torch.numerics.native.memory import spare_memory_of
from quark.torch.pipeline.memory_limit import MemoryLimit, divide_memory
from quark.torch.pipeline.residency import Residency, is_placeholder, placeholder
from quark.torch.pipeline.scratch import Scratch
from quark.torch.pipeline.unit_cache import Unit, UnitCache


def stream_model(
    directory: str | Path,
    max_memory: int | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    scratch: Scratch | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Return a float model whose parameters are read from safetensors when they are used.

    Args:
        directory: Directory of the model.
        max_memory: Bytes that this process may take; None for what the machine has free. Less than
            the work on one block needs is exceeded. Under such a bound, kernels of numba are left
            out while the model is in memory, for the memory that they take.
        dtype: Type of the parameters; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        scratch: Files for values that are changed; None for temporary ones.
        device: Where parameters are brought to.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: As in ``load_float_model``; or ``max_memory`` is less than what is taken.
    """
    directory = Path(directory)
    model, files = open_float_model(directory, trust_remote_code, dtype, **options)
    report_unused(directory, model, files)
    return stream_tensors(model, files, max_memory, scratch, device, directory)


def stream_tensors(
    model: nn.Module,
    files: Reader,
    max_memory: int | None = None,
    scratch: Scratch | None = None,
    device: torch.device | str = "cpu",
    place: Path | None = None,
) -> nn.Module:
    """Give a float model on the meta device parameters that are read when they are used, in place.

    Args:
        model: The model, in the types of its parameters.
        files: Tensors in float.
        max_memory: As in ``stream_model``.
        scratch: As in ``stream_model``.
        device: Where parameters are brought to.
        place: Where the files are, by which a journal knows the model; None to compare its values.

    Raises:
        ValueError: A tensor is missing; or ``max_memory`` is less than what is taken.
    """
    check_buffers(model)
    fill_with_placeholders(model, device)
    source = FloatSource(model, files)
    _read_buffers(model, source, torch.device(device))
    compute_buffers(model, torch.device(device))
    if max_memory is not None:
        spare_memory_of(model)
    limit = divide_memory(max_memory, device)
    Residency(model, source, limit, scratch or Scratch(), device, place)
    return model.eval()


def _read_buffers(model: nn.Module, source: FloatSource, device: torch.device) -> None:
    """Read the buffers that files hold; they are small and stay in memory."""
    state = model.state_dict()
    names = [name for name, _ in model.named_buffers() if name in state]
    for name, values in source.read(names).items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = values.to(device)


def stream_loading(
    loading: Loading, max_memory: int | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """Return a quantized model whose tensors are read when they are used. It is not changed.

    Args:
        loading: The model, ready for its tensors.
        max_memory: As in ``stream_model``.
        device: Where tensors are brought to.

    Raises:
        ValueError: ``max_memory`` is less than what is taken. While the model runs: values that are
            read are not sound.
    """
    model = loading.model
    compute_buffers(model, torch.device(device), loading.outline)
    if max_memory is not None:
        spare_memory_of(model)
    PackedResidency(model, loading, divide_memory(max_memory, device), device)
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    return model.eval()


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse inputs on the meta device, where codes that are not in memory are.

    Raises:
        ValueError: A tensor has no values.
    """
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
        raise ValueError(
            f"{type(model).__name__}: an input is on the meta device and has no values. Give it on "
            "the device that the model computes on, such as the CPU: parameters that are not in "
            "memory are on the meta device, so the device of the first one does not tell."
        )


class PackedResidency(UnitCache):
    """Residency of a quantized model, which nothing changes.

    Released codes and scales are on the meta device. Released parameters in float, of which the
    first one tells the device of a model, are placeholders where they are brought to.

    Args:
        model: The model.
        loading: Its tensors.
        limit: What may be resident; see ``UnitCache``.
        device: Where they are brought to.
    """

    def __init__(
        self,
        model: nn.Module,
        loading: Loading,
        limit: MemoryLimit,
        device: torch.device | str,
    ) -> None:
        super().__init__(model, limit, device)
        self._loading = loading
        self._outline = {n: self._released(n, t) for n, t in loading.outline.items()}
        keys = loading.stored_names()
        self._names = {
            unit.name: {n: keys.get(n) for n in self._outline if _holds(unit, n)}
            for unit in self.units.values()
        }
        same: dict[str, list[str]] = defaultdict(list)  # name in the reader -> names of the model
        for name, key in keys.items():
            same[key].append(name)
        for name in self._outline:
            if _is_float(model, name):
                put_tensor(model, name, self._outline[name])
        self._twins = {n: [t for t in names if t != n] for names in same.values() for n in names}

    def _released(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in for a tensor that is not resident."""
        is_plain = _is_float(self._loading.model, name)
        return placeholder(tensor, self.device) if is_plain else tensor.to("meta")

    def _size_of(self, unit: Unit) -> int:
        tensors = [self._outline[name] for name in self._names[unit.name]]
        return sum(t.numel() * t.itemsize for t in tensors)

    def _read(self, unit: Unit) -> None:
        model, absent = self._loading.model, dict(self._names[unit.name])
        for name in list(absent):
            tied = self._resident_twin(name)
            if tied is not None:
                put_tensor(model, name, tied)
                del absent[name]
        self._loading.fill_part(absent, self.device)
        check_values(unit.modules())

    def _resident_twin(self, name: str) -> torch.Tensor | None:
        """Return the values of a parameter that is tied to another one, if that is resident.

        Example: the output head of most models is their embedding, which is read once.
        """
        for twin in self._twins.get(name, ()):
            path, _, attribute = twin.rpartition(".")
            parameter = getattr(self._loading.model.get_submodule(path), attribute)
            if type(parameter) is nn.Parameter and not is_placeholder(parameter):
                return parameter.data
        return None

    def _drop(self, unit: Unit) -> None:
        for name in self._names[unit.name]:
            put_tensor(self._loading.model, name, self._outline[name])


def _is_float(model: nn.Module, name: str) -> bool:
    """Whether a tensor of a model is a parameter that is not stored as codes."""
    path, _, attribute = name.rpartition(".")
    found = getattr(model.get_submodule(path), attribute, None)
    return type(found) is nn.Parameter and found.is_floating_point()


def _holds(unit: Unit, name: str) -> bool:
    """Whether a tensor belongs to a unit: to one of its modules, or to the quantizer of one."""
    owner = name.rpartition(".")[0]
    return unit.part.holds(owner) or unit.part.holds(owner.rpartition(".")[0])
