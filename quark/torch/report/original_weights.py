"""The weights of a model in float, read one by one under the names of the layers that hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.torch.export.checkpoint.architecture import empty_model
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.float_model import check_float_model
from quark.torch.export.checkpoint.transformers_names import rename_for_model
from quark.torch.export.recognition import open_dequantized, recognize_container
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.linear_experts import LinearExperts


class OriginalWeights:
    """The checkpoint of a model. Only headers are read until weights are needed.

    Weights of a quantized model are dequantized.

    Args:
        directory: Directory of the model.
        trust_remote_code: Passed to Transformers.

    Attributes:
        bytes: Bytes of all its tensors.

    Raises:
        FileNotFoundError: It has no ``config.json`` or no tensors.
        ValueError: It is damaged or quantized by an unknown method, or its tensors are not those of
            the model that it describes.
    """

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        container = recognize_container(directory)
        reader: Any
        if container.is_quantized(directory):
            model, reader = open_dequantized(directory, None, trust_remote_code)
            split_experts(model)
            size = container.contents(directory).summary.bytes
        else:
            stored = CheckpointReader(directory).entries
            config = check_float_model(directory, trust_remote_code)
            model = empty_model(config, stored, directory, trust_remote_code=trust_remote_code)
            split_experts(model)
            reader = rename_for_model(CheckpointReader(directory), model)
            size = sum(entry.nbytes for entry in stored.values())
        self.directory, self.bytes = directory, size
        self._reader = reader
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._tied: dict[str, list[str]] = {}
        for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            self._tied.setdefault(source, []).append(name)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that layers of these shapes were quantized from this model.

        Raises:
            ValueError: A layer is missing, or has another shape.
        """
        entries = self._reader.entries.items()
        empty = ((name, torch.empty(entry.shape, device="meta")) for name, entry in entries)
        found = {
            layer: tuple(weight.shape)
            for name, tensor in empty
            for layer, weight in self._layers(name, tensor)
        }
        for name, shape in shapes.items():
            if found.get(name) != shape:
                has = f"is {list(found[name])}" if name in found else "is missing"
                raise ValueError(
                    f"{self.directory} is not the model that the checkpoint was made of: {name} "
                    f"{has}, the quantized layer is {list(shape)}."
                )

    def weights(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the wanted layers with their weights, in the order of the files."""
        for name, tensor in self._reader.tensors():
            for layer, weight in self._layers(name, tensor):
                if layer in wanted:
                    yield layer, weight

    def _layers(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the layers that a stored tensor holds the weight of."""
        path, _, last = name.rpartition(".")
        module: Any = self._modules.get(path)
        if isinstance(module, LinearExperts) and last in module.stacks:
            yield from ((f"{path}.{p}", matrix) for p, matrix in module.stacks[last].split(tensor))
            return
        stored = self._reader.entries
        for key in (name, *(n for n in self._tied.get(name, ()) if n not in stored)):
            if key.endswith(".weight"):
                yield key.removesuffix(".weight"), tensor
