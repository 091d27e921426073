"""The inputs of a model for ONNX export: named tensors, constants, and axes of dynamic size."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from quark.torch.export.onnx.cache import cache_axes, call, is_past, with_cache
from quark.torch.quantization.graph_mode.inputs import check_arguments

BATCH, SEQUENCE = "batch", "sequence"


class ModelInputs(NamedTuple):
    """The arguments of a model's forward, by name.

    Attributes:
        tensors: Tensors, which become the inputs of the graph.
        constants: All other arguments, which are fixed in the graph.
    """

    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any]

    @classmethod
    def bind(cls, model: nn.Module, args: Any, use_cache: bool = False) -> ModelInputs:
        """Bind arguments to the names of a model's forward, on the device of its parameters.

        Args:
            model: The model. If its forward has ``use_cache``, that is set to False.
            args: A tensor, a sequence of positional arguments, or a mapping of named arguments.
            use_cache: Whether keys and values of the first tokens are inputs; see ``cache``.

        Raises:
            ValueError: The arguments do not match the signature of forward, or none is a tensor;
                or a graph takes other shapes or types; or ``use_cache`` is set for a model without
                a cache of keys and values.
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
        if isinstance(model, fx.GraphModule):
            check_arguments(model, tuple(bound.values()))
        if "use_cache" in signature.parameters:
            bound["use_cache"] = False
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        tensors = {n: v.to(device) for n, v in bound.items() if isinstance(v, torch.Tensor)}
        if not tensors:
            raise ValueError(f"input_args has no tensor among {sorted(bound)}.")
        constants = {n: v for n, v in bound.items() if n not in tensors}
        return cls(with_cache(model, tensors) if use_cache else tensors, constants)

    def run(self, model: nn.Module) -> tuple[list[str], list[torch.Tensor]]:
        """Run the model once; return the names of its outputs ([] if unnamed), and the outputs.

        Raises:
            ValueError: The model does not run on its inputs.
        """
        try:
            with torch.no_grad():
                output = call(model, self.tensors, self.constants)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            given = {n: f"{tuple(t.shape)} {t.dtype}" for n, t in self.tensors.items()}
            raise ValueError(
                f"{type(model).__name__} does not run on input_args ({_listed(given)}): {error}\n"
                "Give input_args of the shapes and types that the model takes."
            ) from error
        if isinstance(output, Mapping):
            named = _named_tensors(output)
            return list(named), list(named.values())
        return [], list(_leaf_tensors(output))

    def trace_examples(self, axes: Sequence[Mapping[int, str]]) -> tuple[torch.Tensor, ...]:
        """Return the inputs with at least two elements along every dynamic axis.

        The exporter treats an axis of size 1 as fixed, so such axes are repeated.

        Args:
            axes: Dynamic axes of each input, from ``dynamic_axes``.
        """
        examples = []
        for tensor, dynamic in zip(self.tensors.values(), axes, strict=True):
            for axis in dynamic:
                if tensor.shape[axis] == 1:
                    tensor = tensor.repeat_interleave(2, axis)
            examples.append(tensor)
        return tuple(examples)

    def dynamic_axes(
        self, model: nn.Module, requested: Mapping[str, Mapping[int, str]] | None
    ) -> list[Mapping[int, str]]:
        """Return the axes of each input that have any size, with names for them.

        Axes of one name have one size in the runtime. So the tokens of a decoder get another name
        than those of its encoder.

        Args:
            model: The model; it runs a few times if it has several inputs of tokens.
            requested: Axes by input. By default the first axis of every input, and the second one
                of integers and flags, such as token ids and masks; of a graph, the axes that it
                was exported with any size of.

        Raises:
            ValueError: An input or an axis does not exist.
        """
        if requested is None and isinstance(model, fx.GraphModule):
            return [_dynamic_axes(model, name) for name in self.tensors]
        if requested is None and any(map(is_past, self.tensors)):
            return cache_axes(self.tensors)
        if requested is None:
            names = self._sequence_names(model)
            return [
                {0: BATCH, **({1: names[name]} if name in names else {})} if tensor.dim() else {}
                for name, tensor in self.tensors.items()
            ]
        for name, axes in requested.items():
            if name not in self.tensors:
                raise ValueError(
                    f"dynamic_shapes names {name!r}, but the inputs are {list(self.tensors)}."
                )
            rank = self.tensors[name].dim()
            wrong = [axis for axis in axes if not 0 <= axis < rank]
            if wrong:
                raise ValueError(
                    f"dynamic_shapes gives axis {wrong[0]} of {name!r}, which has {rank} axes."
                )
        return [requested.get(name, {}) for name in self.tensors]

    def _sequence_names(self, model: nn.Module) -> dict[str, str]:
        """Return a name for the sequence axis of each input of tokens or masks.

        Inputs share a name if the model does not run when some of them are shorter alone, but
        runs when they are shorter together, as ``input_ids`` and ``attention_mask``.
        """
        rest = [name for name, tensor in self.tensors.items() if self._is_tokens(tensor)]
        groups: list[list[str]] = []
        while rest:
            size = self.tensors[rest[0]].shape[1]
            first, *same = (name for name in rest if self.tensors[name].shape[1] == size)
            subsets = (
                [first, *others]
                for count in range(len(same) + 1)
                for others in itertools.combinations(same, count)
            )
            whole = [first, *same]
            group = next((g for g in subsets if same and self._runs_shorter(model, g)), whole)
            groups.append(group)
            rest = [name for name in rest if name not in group]
        titles = [SEQUENCE, *(f"{group[0]}_{SEQUENCE}" for group in groups[1:])]
        return {n: title for group, title in zip(groups, titles, strict=False) for n in group}

    def _runs_shorter(self, model: nn.Module, names: Sequence[str]) -> bool:
        """Whether a model runs with some inputs of tokens shorter than the others."""
        changed = {}
        for name, tensor in self.tensors.items():
            if self._is_tokens(tensor):
                # An axis of size 1 would be broadcast.
                tensor = tensor if tensor.shape[1] > 2 else tensor.repeat(1, 3)
                tensor = tensor[:, :-1] if name in names else tensor
            changed[name] = tensor
        try:
            with torch.no_grad():
                model(**changed, **self.constants)
        except Exception:  # a model may raise anything for sizes that do not agree
            return False
        return True

    @staticmethod
    def _is_tokens(tensor: torch.Tensor) -> bool:
        """Whether a tensor may be tokens or a mask, (sequences, tokens)."""
        return tensor.dim() == 2 and not tensor.is_floating_point()


class PositionalModel(nn.Module):
    """A model whose forward accepts tensors by position and returns tensors only."""

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        super().__init__()
        self.model = model
        self.names, self.constants = list(inputs.tensors), inputs.constants

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the outputs of the model; of named outputs, those that are tensors."""
        output = call(self.model, dict(zip(self.names, tensors, strict=True)), self.constants)
        return tuple(_named_tensors(output).values()) if isinstance(output, Mapping) else output


def _dynamic_axes(graph: fx.GraphModule, name: str) -> dict[int, str]:
    """Return the axes of an input that have any size in an exported graph, with names for them.

    Axes of one size have one name: "batch" if they come first, else that of the symbol of torch.
    """
    values = {n.name: n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"}
    first = {str(v.shape[0]) for v in values.values() if isinstance(v, torch.Tensor) and v.dim()}
    value = values.get(name)
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    symbols = {axis: str(n) for axis, n in enumerate(sizes) if not isinstance(n, int)}
    batches = [symbol for symbol in sorted(first) if not symbol.isdigit()]
    return {a: BATCH if batches == [symbol] else symbol for a, symbol in symbols.items()}


def _listed(texts: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def _leaf_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested sequences and mappings."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, Sequence)) and not isinstance(output, str):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _leaf_tensors(part)


def _named_tensors(output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
