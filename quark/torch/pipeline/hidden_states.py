"""Where hidden states are among the arguments of a block, and in what it returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Positional and keyword arguments of a block, without the hidden states.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def split_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, Arguments]:
    """Return the hidden states among the arguments of a block, and the other arguments.

    Example: ``block(x, mask, use_cache=False)`` -> x and ((mask,), {"use_cache": False}).
    """
    if args:
        return args[0], (args[1:], kwargs)
    keyword = hidden_keyword(kwargs)
    others = dict(kwargs)
    return others.pop(keyword), ((), others)


def hidden_keyword(kwargs: dict[str, Any]) -> str:
    """Return the argument that is the hidden states: ``hidden_states``, or the first tensor.

    Raises:
        ValueError: No argument is a tensor.
    """
    tensors = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ValueError(
            f"A block was called without a tensor (arguments: {', '.join(kwargs) or 'none'})."
        )
    return "hidden_states" if "hidden_states" in tensors else tensors[0]


class OutputForm(NamedTuple):
    """The form in which a block returns hidden states, such as a tuple.

    Attributes:
        output: What it returned for some tokens, with an empty tensor for the hidden states, which
            would fill the memory.
        place: Place of the hidden states in a tuple.
    """

    output: Any
    place: int

    @classmethod
    def of(cls, output: Any, shape: torch.Size) -> OutputForm:
        """Return the form of an output: the first tensor of a shape is the hidden states.

        Args:
            output: The output.
            shape: Shape of the hidden states that the block received.
        """
        if isinstance(output, torch.Tensor):
            return cls(output.new_empty(0), 0)
        items = output if isinstance(output, tuple) else ()
        fits = (i for i, y in enumerate(items) if isinstance(y, torch.Tensor) and y.shape == shape)
        return cls._at(output, next(fits, 0))

    @classmethod
    def _at(cls, output: Any, place: int) -> OutputForm:
        items = output if isinstance(output, tuple) else ()
        if items and isinstance(items[place], torch.Tensor):
            return cls(_with_item(output, place, items[place].new_empty(0)), place)
        return cls(output, place)

    @classmethod
    def received(cls, output: Any, x: torch.Tensor) -> OutputForm | None:
        """Return the form of an output of which the next block receives a tensor.

        None if the output is not a tuple with it.
        """
        items = output if isinstance(output, tuple) else ()
        place = next((i for i, y in enumerate(items) if y is x), None)
        return None if place is None else cls._at(output, place)

    @property
    def is_plain(self) -> bool:
        """Whether the block returns hidden states alone, whatever tokens it received."""
        if isinstance(self.output, torch.Tensor):
            return True
        if not isinstance(self.output, tuple) or not self.output:
            return False
        others = [*self.output[: self.place], *self.output[self.place + 1 :]]
        is_tensor = isinstance(self.output[self.place], torch.Tensor)
        return is_tensor and all(other is None for other in others)

    def without_values(self) -> OutputForm:
        """Return this form with NaN in place of floats beside the hidden states, else zeros."""
        return self._replace(output=_empty_of_values(self.output))

    def wrap(self, x: torch.Tensor) -> Any:
        """Return hidden states in this form."""
        return (
            x if isinstance(self.output, torch.Tensor) else _with_item(self.output, self.place, x)
        )


class OutputForms:
    """The forms of the outputs of blocks that run one after the other.

    The tensor that the next block receives is the hidden states; where none of them is, such as
    behind the last block, the first one of the shape is.

    Attributes:
        by_name: Name of a block -> form of its output.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, OutputForm] = {}
        self._last: tuple[str, Any] | None = None

    def receive(self, x: torch.Tensor) -> None:
        """Record the hidden states that the next block receives."""
        if self._last is not None:
            name, output = self._last
            form = OutputForm.received(output, x)
            if form is not None:
                self.by_name[name] = form

    def leave(self, name: str, output: Any, shape: torch.Size) -> None:
        """Record what a block returns that received hidden states of a shape."""
        self.by_name[name] = OutputForm.of(output, shape)
        self._last = name, output


def _empty_of_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, torch.nan if value.is_floating_point() else 0)
    return tuple(map(_empty_of_values, value)) if type(value) is tuple else value


def _with_item(output: Any, place: int, x: torch.Tensor) -> Any:
    """Return a tuple with another item in a place."""
    make = getattr(output, "_make", type(output))  # a named tuple takes its items one by one
    return make((*output[:place], x, *output[place + 1 :]))
