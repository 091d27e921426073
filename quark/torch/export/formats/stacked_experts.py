"""Experts that a checkpoint stores stacked, quantized: split on reading, stacked on writing.

Example of two experts, where the rows of ``gate_up_proj`` belong to one linear layer each::

    experts.gate_up_proj_blocks  (2, 5760, 90, 16)  ->  experts.0.gate_up_proj.weight  (5760, 1440)
                                                        experts.1.gate_up_proj.weight  (5760, 1440)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.quantization.nn.linear_experts import LinearExperts, Stack


class StackedTensor(NamedTuple):
    """A kind of tensor that is stored for all experts of a stack.

    Attributes:
        part: Name of the tensor of one expert, relative to its linear layer, in the checkpoint.
        merged_axes: Number of last axes that are one axis of the tensor of an expert.
        is_transposed: Whether matrices are stored (in, out) if the float parameter is.
    """

    part: str
    merged_axes: int = 1
    is_transposed: bool = False


# Experts in fp8, as Transformers stores them.
FP8_STACKS = {
    "": StackedTensor("weight", is_transposed=True),
    "_scale_inv": StackedTensor("weight_scale_inv", is_transposed=True),
    "_bias": StackedTensor("bias"),
}


class UnstackedReader:
    """Tensors of another reader, with a tensor for each expert instead of stacked ones.

    Args:
        reader: Reader of the checkpoint, with the names of the model.
        model: The model, with split experts.
        kinds: End of the stored name, after that of the stacked parameter -> kind of the tensor.

    Attributes:
        entries: Headers by name.
    """

    def __init__(self, reader: Any, model: nn.Module, kinds: Mapping[str, StackedTensor]) -> None:
        self.reader = reader
        self.entries: dict[str, TensorHeader] = dict(reader.entries)
        self.stacks: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {}
        self.origins: dict[str, str] = {}  # name of an expert's tensor -> stored name
        # The last stacked tensor of each kind: experts are read one after the other.
        self.last: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
        for path, module in model.named_modules():
            if isinstance(module, LinearExperts):
                for name, stack in module.stacks.items():
                    for end, kind in kinds.items():
                        self._add(f"{path}.{name}{end}", path, stack, kind)

    def _add(self, key: str, path: str, stack: Stack, kind: StackedTensor) -> None:
        header = self.reader.entries.get(key)
        if header is None:
            return
        stack = stack._replace(is_transposed=stack.is_transposed and kind.is_transposed)

        def split(stacked: torch.Tensor) -> dict[str, torch.Tensor]:
            axes = max(stacked.dim() - kind.merged_axes, 0)
            parts = stack.split(stacked.flatten(axes))
            return {f"{path}.{place}.{kind.part}": part for place, part in parts}

        empty = torch.empty(header.shape, dtype=header.dtype, device="meta")
        try:
            parts = split(empty)
        except (IndexError, RuntimeError, ValueError):
            raise ValueError(
                f"{key} has the shape {list(header.shape)}, which is not that of stacked experts: "
                "the checkpoint is damaged. Download or export it again."
            ) from None
        del self.entries[key]
        self.stacks[key] = split
        for name, part in parts.items():
            size = header.nbytes // len(parts)
            self.entries[name] = TensorHeader(header.file, tuple(part.shape), part.dtype, size)
            self.origins[name] = key

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        key = self.origins.get(name)
        if key is None:
            stored: torch.Tensor = self.reader.tensor(name)
            return stored
        kind = name.rpartition(".")[2]
        last, parts = self.last.get(kind, ("", {}))
        if last != key:
            self.last.pop(kind, None)
            parts = self.stacks[key](self.reader.tensor(key))
            self.last[kind] = key, parts
        return parts[name]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self.reader.tensors():
            split = self.stacks.get(key)
            yield from [(key, tensor)] if split is None else split(tensor).items()


class ExpertStacks:
    """Stacked parameters that the layers of experts of a model become in a checkpoint.

    Args:
        stacks: Name of each parameter -> names of its layers, expert by expert.
        kinds: Name of a tensor relative to its layer -> end of the name of the stacked tensor.
    """

    def __init__(self, stacks: Mapping[str, Sequence[str]], kinds: Mapping[str, str]) -> None:
        self._layers = {stack: list(layers) for stack, layers in stacks.items()}
        self._stack_of = {layer: stack for stack, layers in stacks.items() for layer in layers}
        self._kinds = kinds

    def __contains__(self, key: str) -> bool:
        """Whether a tensor, by its full name, becomes part of a stacked one."""
        layer, _, part = key.rpartition(".")
        return layer in self._stack_of and part in self._kinds

    def join(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors with a stacked one, (experts, ...), at the place of the first expert's.

        Args:
            state: Tensors by their full names, of all experts of a parameter or of none.
        """
        joined: dict[str, torch.Tensor] = {}
        for key, tensor in state.items():
            layer, _, part = key.rpartition(".")
            if key not in self:
                joined[key] = tensor
            elif layer == self._layers[self._stack_of[layer]][0]:
                layers = self._layers[self._stack_of[layer]]
                name = f"{self._stack_of[layer]}{self._kinds[part]}"
                joined[name] = torch.stack([state[f"{one}.{part}"] for one in layers])
        return joined
