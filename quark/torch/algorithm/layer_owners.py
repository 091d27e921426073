"""Layers dealt out to processes: the owner of a layer changes it, and the others get the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quark.torch.graph.parameter_writes import write_
from quark.torch.pipeline.processes import Processes, State, describe, processes
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import PARAMETERS
from quark.torch.quantization.nn.quantizer import PARTS

logger = logging.getLogger("quark")

Layers = Mapping[str, FakeQuantizedLayer]


def change_layers(
    layers: Layers, groups: Sequence[Sequence[str]], change: Callable[[Sequence[str]], None]
) -> None:
    """Change groups of layers, each in one of the processes, and share the results.

    Args:
        layers: The layers by name.
        groups: Names of the layers that one process changes together.
        change: Changes the weights, biases and scales of a group, and nothing else.
    """
    group = processes()
    owners = _deal([_cost(layers, names) for names in groups], group.count)
    own = [names for names, owner in zip(groups, owners, strict=True) if owner == group.rank]
    with _kept_records(group) as records:
        for names in own:
            change(names)
    if group.count > 1:
        _share(group, layers, groups, owners, records)


def _cost(layers: Layers, names: Sequence[str]) -> float:
    """Return about how long it takes to round layers column by column: rows · columns²."""
    weights = [(layers[name].weight, layers[name].input_axis) for name in names]
    return float(sum(weight.numel() * weight.shape[axis] for weight, axis in weights))


def _deal(costs: Sequence[float], count: int) -> list[int]:
    """Return a process for each cost: the largest first, each to the process with least so far."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _share(
    group: Processes,
    layers: Layers,
    groups: Sequence[Sequence[str]],
    owners: Sequence[int],
    records: list[tuple[int, str]],
) -> None:
    """Give every process the state of the layers of all owners."""
    owned = {name: owner for names, owner in zip(groups, owners, strict=True) for name in names}
    own = {
        name: (layers[name].frozen, describe(_state(layers[name])))
        for name, owner in owned.items()
        if owner == group.rank
    }
    messages = group.exchange({"layers": own, "records": records})
    for name, owner in owned.items():
        layer = layers[name]
        layer.frozen, header = messages[owner]["layers"][name]
        state = group.broadcast(_state(layer), header, owner)
        if owner != group.rank:
            _set_state(layer, state)
    if group.is_first:
        for level, text in (record for message in messages[1:] for record in message["records"]):
            logger.log(level, "%s", text)


def _state(layer: FakeQuantizedLayer) -> State:
    """Return parameters and scales of a layer."""
    quantizers = layer.parameter_quantizers().values()
    scales = [getattr(quantizer, part) for quantizer in quantizers for part in PARTS]
    return [*(getattr(layer, name, None) for name in PARAMETERS), *scales]


def _set_state(layer: FakeQuantizedLayer, state: State) -> None:
    for name, values in zip(PARAMETERS, state, strict=False):
        if values is not None:
            write_(getattr(layer, name), values)
    scales = iter(state[len(PARAMETERS) :])
    for quantizer in layer.parameter_quantizers().values():
        for part in PARTS:
            setattr(quantizer, part, next(scales))


class _Records(logging.Handler):
    """Keeps the records of the log of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append((record.levelno, record.getMessage()))


@contextmanager
def _kept_records(group: Processes) -> Iterator[list[tuple[int, str]]]:
    """Keep what is logged inside the context, for the first process, which logs for all."""
    handler: Any = _Records()
    if group.is_first:
        yield []
        return
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield handler.records
    finally:
        logger.handlers, logger.propagate = handlers, propagates
