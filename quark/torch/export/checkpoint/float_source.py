"""Float models without values, and the source of their values: the files of a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.export.checkpoint.architecture import empty_model, model_class, read_config
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.float_model import match_headers
from quark.torch.export.checkpoint.header_checks import tied_names
from quark.torch.export.checkpoint.parameter_types import kept_types
from quark.torch.export.checkpoint.reader import Reader
from quark.torch.export.checkpoint.transformers_names import (
    ConvertedReader,
    remember_conversions,
    rename_for_model,
)
from quark.torch.quantization.nn.linear_experts import LinearExperts


def open_float_model(
    directory: Path,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    **options: Any,
) -> tuple[nn.Module, Reader]:
    """Return the float model of a directory without values, and the files.

    Names, shapes and types are those of the model that Transformers would load, tied parameters
    included. Parameters are on the meta device.

    Args:
        directory: Directory of safetensors.
        trust_remote_code: Whether Python code of the directory may run.
        dtype: Type of the parameters; ``auto`` for the stored one.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Transformers does not know the architecture, or tensors do not fit it.
    """
    config = read_config(directory, trust_remote_code)
    cls = model_class(config, directory, trust_remote_code)
    if not isinstance(config, getattr(cls, "config_class", None) or object):
        config = cls.config_class.from_pretrained(directory)  # of a type with the same layers
    files = CheckpointReader(directory)
    if dtype != "auto":
        config.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    elif getattr(config, "dtype", None) is None:  # Transformers takes the first type of the files
        types = (entry.dtype for entry in files.entries.values())
        config.dtype = next((t for t in types if t.is_floating_point), torch.float32)
    model: Any = empty_model(
        config,
        files.entries,
        directory,
        config.dtype,
        trust_remote_code=trust_remote_code,
        **options,
    )
    _set_types(model, config.dtype)
    reader = match_headers(model, files)
    _untie_different(model, reader)
    remember_conversions(model, reader)
    read_generation_config(model, directory, trust_remote_code)
    return model.eval(), files


def _set_types(model: Any, dtype: torch.dtype) -> None:
    """Give tensors that Transformers keeps in float32 that type."""
    state = model.state_dict(keep_vars=True)
    for name, kind in kept_types(model, dtype).items():
        state[name].data = state[name].data.to(kind)


def _untie_different(model: Any, reader: Reader) -> None:
    """Untie parameters that the files hold apart with different values."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in dict(tied).items():
        both = name in reader.entries and source in reader.entries
        if both and not torch.equal(reader.tensor(name), reader.tensor(source)):
            tied.pop(name)
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[own] = nn.Parameter(
                torch.empty_like(module._parameters[own]), requires_grad=False
            )


def read_generation_config(model: Any, directory: Path, trust_remote_code: bool) -> None:
    """Give a model of Transformers the settings of generation that lie beside it.

    Args:
        model: The model.
        directory: Directory of its files.
        trust_remote_code: Passed to Transformers.
    """
    if not model.can_generate():
        return
    model.adjust_generation_fn(
        None,
        False,
        None,
        directory,
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision="main",
        subfolder="",
        trust_remote_code=trust_remote_code,
    )


def fill_with_placeholders(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Replace tensors on the meta device by zeros that take no memory, in place.

    Each tensor is one zero, expanded to the shape. Tied parameters stay tied, and others have
    addresses of their own, so that a model without values is handled like any other. Buffers that
    no checkpoint stores stay as they are.

    Args:
        model: The model.
        device: Device of the zeros. Parameters begin on the device where they will stay, since
            torch does not move the values of a parameter to every kind of device.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        placeholder(parameter, device), requires_grad=False
                    )
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            is_stored = name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_meta and is_stored:
                module._buffers[name] = placeholder(buffer, device)


def placeholder(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return zeros of the shape and type of a tensor that take no memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class _Slice(NamedTuple):
    """A matrix or bias of an expert in a stacked tensor: the name of it, and the names of all."""

    stack: str
    experts: LinearExperts


class FloatSource:
    """Tensors of a float model by its names, read from files when they are asked for.

    Args:
        model: The model, with placeholders for values and experts split as they will be quantized.
        files: The files.

    Raises:
        ValueError: The files have no value for a tensor of the model.
    """

    def __init__(self, model: nn.Module, files: Reader) -> None:
        self._reader: Reader = rename_for_model(files, model)
        state = model.state_dict()
        self._types = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        self._aliases = self._find_aliases(model)
        self._slices = self._find_slices(model)
        for name in state:
            if self._stored(name) not in self._reader.entries and name not in self._slices:
                raise ValueError(
                    f"{name} is not in the files, and its value is computed when the model is "
                    "loaded: quantize the model in memory, with ModelQuantizer.quantize_model."
                )

    def _find_aliases(self, model: nn.Module) -> dict[str, str]:
        """Return names without a tensor in the files -> names of tensors that they are tied to."""
        groups: dict[str, list[str]] = {}
        for name, source in tied_names(model).items():
            groups.setdefault(source, [source]).append(name)
        return {
            name: stored
            for group in groups.values()
            for stored in [n for n in group if n in self._reader.entries][:1]
            for name in group
            if name not in self._reader.entries
        }

    def _find_slices(self, model: nn.Module) -> dict[str, _Slice]:
        """Return the names of matrices and biases that the files hold stacked."""
        slices: dict[str, _Slice] = {}
        for name, module in model.named_modules():
            if not isinstance(module, LinearExperts):
                continue
            for stack, layout in module.stacks.items():
                for suffix, part in (("", "weight"), ("_bias", "bias")):
                    if f"{name}.{stack}{suffix}" in self._reader.entries:
                        one = _Slice(f"{name}.{stack}{suffix}", module)
                        places = layout.layer_names(module.num_experts)
                        slices |= {f"{name}.{place}.{part}": one for place in places}
        return slices

    def keep_types(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read tensors in the types of the files, and give placeholders these types.

        Args:
            tensors: Placeholders by their names in the model.
        """
        for name, tensor in tensors.items():
            dtype = self._reader.entries[self.origin(name)].dtype
            tensor.data = torch.zeros((), dtype=dtype, device="cpu").expand(tensor.shape)
            self._types[name] = tensor.shape, dtype

    def origin(self, name: str) -> str:
        """Return the name of the tensor that is read for a tensor; equal for slices of one."""
        return self._slices[name].stack if name in self._slices else self._stored(name)

    def _stored(self, name: str) -> str:
        return self._aliases.get(name, name)

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return tensors in the shapes and types of the model; a stack is read once for all."""
        values: dict[str, torch.Tensor] = {}
        stacks: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            if name in self._slices:
                stack, experts = self._slices[name]
                if stack not in stacks:
                    stacks[stack] = self._split(stack, experts)
                value = stacks[stack][name]
            else:
                value = self._reader.tensor(self._stored(name))
            shape, dtype = self._types[name]
            values[name] = value.reshape(shape).to(dtype)
        return values

    def stores_rows(self, name: str) -> bool:
        """Whether the files hold a tensor in its shape, so that its rows can be read in parts."""
        return self._row_reader(name) is not None

    def read_rows(self, name: str, size: int) -> Iterator[torch.Tensor]:
        """Iterate over parts of a tensor along its first axis, in the type of the model.

        Args:
            name: Name of a tensor for which ``stores_rows``.
            size: Bytes of a part, which has at least a row.

        Raises:
            ValueError: The files do not hold the tensor in its shape.
        """
        found = self._row_reader(name)
        if found is None:
            raise ValueError(f"{name} is not stored in its shape: read it whole.")
        reader, key = found
        header = reader.entries[key]
        rows = max(1, size * header.shape[0] // max(1, header.nbytes))
        for start in range(0, header.shape[0], rows):
            part = reader.rows(key, start, min(start + rows, header.shape[0]))
            yield part.to(self._types[name][1])

    def _row_reader(self, name: str) -> tuple[CheckpointReader, str] | None:
        """Return the files that hold a tensor in its shape, and its name there; None if none do."""
        reader, key = self._reader, self._stored(name)
        if isinstance(reader, ConvertedReader):
            reader, key = reader.reader, reader.stored.get(key, "")
        if name in self._slices or not isinstance(reader, CheckpointReader):
            return None
        header, shape = reader.entries.get(key), tuple(self._types[name][0])
        return (reader, key) if shape and header is not None and header.shape == shape else None

    def _split(self, stack: str, experts: LinearExperts) -> dict[str, torch.Tensor]:
        """Return the matrices or biases of a stacked tensor by their names in the model."""
        owner, _, last = stack.rpartition(".")
        part = "weight" if last in experts.stacks else "bias"
        layout = experts.stacks[last if part == "weight" else last.removesuffix("_bias")]
        tensors = layout.split(self._reader.tensor(stack))
        return {f"{owner}.{place}.{part}": tensor for place, tensor in tensors}
