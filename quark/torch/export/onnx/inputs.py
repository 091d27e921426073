"""How a model is called where it is exported: by names of inputs, with examples of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

BATCH, SEQUENCE = "batch", "sequence"


class Call(NamedTuple):
    """The arguments of a model.

    Attributes:
        inputs: Tensors by name: what the graph takes.
        constants: The other arguments, which the graph keeps.
    """

    inputs: dict[str, torch.Tensor]
    constants: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, args: Any) -> Call:
        """Name the arguments of a model and put tensors where its parameters are.

        Args:
            model: The model. If it can return a key-value cache, it is told not to.
            args: A tensor, a sequence of positional arguments or a mapping of named ones.

        Raises:
            ValueError: The model does not take them, or none is a tensor.
        """
        signature = inspect.signature(model.forward)
        positional = (args,) if isinstance(args, torch.Tensor) else args
        named = dict(args) if isinstance(args, Mapping) or hasattr(args, "items") else {}
        try:
            bound = signature.bind(*(() if named else positional), **named).arguments
        except TypeError as error:
            raise ValueError(
                f"{type(model).__name__} does not take input_args ({error}): give a tensor, a "
                f"tuple of arguments or a mapping of them to {signature}."
            ) from None
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in bound:
                raise ValueError(
                    f"{type(model).__name__} takes any number of inputs ({signature}), which have "
                    "no names here: export a module whose forward names them."
                )
        if "use_cache" in signature.parameters:
            bound["use_cache"] = False
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        inputs = {n: v.to(device) for n, v in bound.items() if isinstance(v, torch.Tensor)}
        if not inputs:
            raise ValueError(f"input_args has no tensor among {sorted(bound)}.")
        return cls(inputs, {n: v for n, v in bound.items() if n not in inputs})

    def run(self, model: nn.Module) -> tuple[list[str], list[torch.Tensor]]:
        """Run the model once and return its outputs, and their names, [] where they have none."""
        with torch.no_grad():
            output = model(**self.inputs, **self.constants)
        if isinstance(output, Mapping):
            named = _tensors(output)
            return list(named), list(named.values())
        return [], list(_leaves(output))

    def repeated(self, shapes: Sequence[Mapping[int, str]]) -> tuple[torch.Tensor, ...]:
        """Return the inputs, where axes that may vary but have one element have it twice.

        A trace takes one element for a fixed size.
        """
        made = []
        for tensor, axes in zip(self.inputs.values(), shapes, strict=True):
            for axis in axes:
                if tensor.shape[axis] == 1:
                    tensor = tensor.repeat_interleave(2, axis)
            made.append(tensor)
        return tuple(made)

    def shapes(self, given: Mapping[str, Mapping[int, str]] | None) -> list[Mapping[int, str]]:
        """Return the axes of each input that may vary, with names for them.

        Args:
            given: Those that the caller wants, by input. By default the first axis of every input,
                and the second one of integers and flags, such as token ids and masks.

        Raises:
            ValueError: An input or an axis does not exist.
        """
        if given is None:
            return [self._default(tensor) for tensor in self.inputs.values()]
        for name, axes in given.items():
            if name not in self.inputs:
                raise ValueError(
                    f"dynamic_shapes names {name!r}, but the inputs are {list(self.inputs)}."
                )
            rank = self.inputs[name].dim()
            wrong = [axis for axis in axes if not 0 <= axis < rank]
            if wrong:
                raise ValueError(
                    f"dynamic_shapes gives axis {wrong[0]} of {name!r}, which has {rank} axes."
                )
        return [given.get(name, {}) for name in self.inputs]

    @staticmethod
    def _default(tensor: torch.Tensor) -> dict[int, str]:
        if tensor.is_floating_point() or tensor.dim() != 2:
            return {0: BATCH} if tensor.dim() else {}
        return {0: BATCH, 1: SEQUENCE}


class Entry(nn.Module):
    """A model that takes tensors by position and returns tensors alone."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.names, self.constants = list(call.inputs), call.constants

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the outputs: those that are tensors where the model names them."""
        output = self.model(**dict(zip(self.names, inputs, strict=True)), **self.constants)
        return tuple(_tensors(output).values()) if isinstance(output, Mapping) else output


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors of an output and of what it holds."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, Sequence)) and not isinstance(output, str):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _leaves(part)


def _tensors(output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
