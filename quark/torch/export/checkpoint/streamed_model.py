"""Float models larger than memory: their parameters are read from the files when they are used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.computed_buffers import check_buffers, compute_buffers
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.float_model import check_float_reader
from quark.torch.export.checkpoint.header_checks import tied_names
from quark.torch.export.checkpoint.transformers_names import rename_for_model
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch


def open_float_model(
    directory: Path,
    limit: int,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    scratch: Scratch | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Return a float model whose parameters are read from safetensors when they are used.

    Args:
        directory: Directory of the model.
        limit: Bytes of parameters in memory, apart from those that are in use.
        dtype: Type of the parameters; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        scratch: Files for values that are changed; None for temporary ones.
        device: Where parameters are brought to.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: As in ``load_float_model``.
    """
    config = read_config(directory, trust_remote_code)
    reader: Any = CheckpointReader(directory)
    wanted = _model_type(dtype, config, reader)
    model = empty_model(
        config,
        reader.entries,
        directory,
        wanted,
        trust_remote_code=trust_remote_code,
        **options,
    )
    reader = rename_for_model(reader, model)
    check_float_reader(reader, model)
    check_buffers(model)
    source = FileSource(reader, model, wanted)
    source.place_parameters(model, torch.device(device))
    for name in source.stored_buffers(model):
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = source.read(name).to(device)
    compute_buffers(model, torch.device(device))
    Residency(model, source, limit, scratch or Scratch(), device)
    return model.eval()


class FileSource:
    """The values of the parameters of a model, from the files of a checkpoint.

    Args:
        reader: Tensors by the names of the model.
        model: The model, on the meta device.
        dtype: Type of the model; some architectures keep parameters in float32.
    """

    def __init__(self, reader: Any, model: Any, dtype: torch.dtype) -> None:
        self._reader = reader
        self._tied = tied_names(model)
        self._types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
        for pattern, kept in plan.items():
            matched = re.compile(pattern.replace("*", ".*"))
            named = (n for n, own in self._types.items() if matched.search(n))
            self._types |= {name: kept for name in named if self._types[name].is_floating_point}

    def read(self, name: str) -> torch.Tensor:
        """Return the values of a parameter or buffer, in its type."""
        values: torch.Tensor = self._reader.tensor(self._stored_name(name))
        return values.to(self._types[name])

    def _stored_name(self, name: str) -> str:
        """Return the name that a tensor is stored under: its own, or that of one tied to it."""
        others = [n for n, source in self._tied.items() if source == name]
        names = [name, self._tied.get(name, name), *others]
        return next(n for n in names if n in self._reader.entries)

    def place_parameters(self, model: nn.Module, device: torch.device) -> None:
        """Give a model on the meta device parameters of the right type, whose values take no room.

        Tensors that the architecture ties are one parameter, unless two different ones are stored.
        """
        made: dict[str, nn.Parameter] = {}
        for name, old in list(model.named_parameters(remove_duplicate=False)):
            first = name if self._is_apart(name) else self._tied.get(name, name)
            if first not in made:
                empty = torch.zeros((), dtype=self._types[name], device=device).expand(old.shape)
                made[first] = nn.Parameter(empty, old.requires_grad and empty.is_floating_point())
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = made[first]

    def _is_apart(self, name: str) -> bool:
        """Whether a tensor that the architecture ties is stored with other values."""
        source, entries = self._tied.get(name), self._reader.entries
        if source is None or name not in entries or source not in entries:
            return False
        return not torch.equal(self._reader.tensor(name), self._reader.tensor(source))

    def stored_buffers(self, model: nn.Module) -> list[str]:
        """Return the names of the buffers that are stored."""
        state = model.state_dict()
        return [n for n, _ in model.named_buffers() if n in state and n in self._reader.entries]


def _model_type(dtype: str | torch.dtype, config: Any, reader: Any) -> torch.dtype:
    """Return the type of a model: the one asked for, that of its configuration, or of its files."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        found: torch.dtype = getattr(torch, dtype)
        return found
    own = getattr(config, "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    stored = (entry.dtype for entry in reader.entries.values())
    return next((t for t in stored if t.is_floating_point), torch.float32)
