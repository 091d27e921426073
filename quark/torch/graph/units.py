"""Units of a model: its blocks, and what lies around them in parts that data runs through alone.

Algorithms walk through units in the order of execution. Around the lists of blocks, a unit is a
residual block, or a single layer:

    ResNet       conv1, layer1.0, layer1.1, layer2.0, …, fc
    ViT          embeddings.patch_embeddings.projection, layers.0, layers.1, …
    plain        conv1, conv2, conv3, …
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from quark.torch.graph.block_selection import is_inside
from quark.torch.graph.trace import Op, Trace, Value


def find_units(model: nn.Module, trace: Trace) -> list[str]:
    """Return the units of a model in the order of execution.

    A residual block is a module that adds two tensors that depend on the data, and holds no other
    such module; so is every module of the same class, or of the class of a block. A block that is a
    sequence of residual blocks, such as a stage of a ResNet, is divided into these. Where a model
    has other blocks, linear layers around them are not units: these are heads, embeddings and
    routers. A layer that runs several times lies in the smallest module around it that runs once.

    Args:
        model: The model.
        trace: Record of a forward pass.
    """
    finder = _UnitFinder(model, trace)
    units = {*finder.blocks, *finder.visit("", model)}
    return [name for name in trace.runs if name in units]


class _UnitFinder:
    """Looks for the units around the blocks of a model.

    Attributes:
        blocks: The blocks that are units.
    """

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self._runs = trace.runs
        adding = {op.module for op in trace.ops if _joins_streams(op, trace)} - {""}
        inner = {n for n in adding if not any(is_inside(m, n) for m in adding - {n})}
        residual = {type(model.get_submodule(name)) for name in inner}
        self.blocks = [
            name for name in trace.blocks if not _is_sequence(model.get_submodule(name), residual)
        ]
        self._kinds = residual | {type(model.get_submodule(name)) for name in self.blocks}
        least = 3 if self.blocks else 2  # axes of the weight
        self._layers = [
            name
            for name, module in model.named_modules()
            if _weight_axes(module) >= least
            and name in trace.runs
            and not any(is_inside(name, block) for block in self.blocks)
        ]

    def visit(self, name: str, module: nn.Module) -> list[str]:
        """Return the units in a module."""
        inside = [layer for layer in self._layers if not name or is_inside(layer, name)]
        if not inside:
            return []
        is_whole = self._can_run_alone(name)
        if is_whole and (name in self._layers or type(module) in self._kinds):
            return [name]
        units: list[str] = []
        for child, part in module.named_children():
            units += self.visit(f"{name}.{child}" if name else child, part)
        is_covered = all(any(is_inside(layer, unit) for unit in units) for layer in inside)
        return [name] if is_whole and not is_covered else units

    def _can_run_alone(self, name: str) -> bool:
        """Whether a module runs once, from a tensor to a tensor, and holds no block."""
        run = self._runs.get(name)
        holds_block = any(is_inside(block, name) for block in self.blocks)
        return bool(name and run and run.calls == 1 and run.maps_tensor and not holds_block)


def _weight_axes(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    return 0 if weight is None else weight.dim()


def _is_sequence(block: nn.Module, kinds: set[type[nn.Module]]) -> bool:
    """Whether a block holds a sequence of several modules of one of some classes."""
    sequences = [list(m) for m in block.modules() if isinstance(m, nn.Sequential)]
    return any(len(s) > 1 and {type(m) for m in s} <= kinds for s in sequences)


def _joins_streams(op: Op, trace: Trace) -> bool:
    """Whether an operation adds two tensors of one shape that are not parameters."""
    terms: Iterable[object] = op.args[:2]
    values = [term for term in terms if isinstance(term, Value)]
    return (
        op.name == "add"
        and len(values) == 2
        and values[0].shape == values[1].shape
        and not any(value.number in trace.parameters for value in values)
    )
