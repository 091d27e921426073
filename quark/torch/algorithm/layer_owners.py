"""Layers dealt out to processes: the owner of a layer changes it, and the others get the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from quark.torch.graph.parameter_writes import write_
from quark.torch.pipeline.kept_records import Records, kept_records
from quark.torch.pipeline.processes import Processes, State, describe, processes
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import PARTS

logger = logging.getLogger("quark")

Layers = Mapping[str, FakeQuantizedLayer]


# Work of a layer, in units of the elements of its weight: that of rounding column by column grows
# with the columns, that of the search for ranges and scales does not. Measured on a CPU.
_SEARCH = 1000
_FACTOR = 0.25  # work of factoring the Hessian of an input, in units of its inputs cubed


def change_layers(
    layers: Layers, groups: Sequence[Sequence[str]], change: Callable[[Sequence[str]], None]
) -> None:
    """Change layers, each in one of the processes, and share the results.

    Args:
        layers: The layers by name.
        groups: Names of the layers that share an input. A process computes what depends on the
            input alone once for all layers of the group that it changes.
        change: Changes the weights, biases and scales of layers of a group, and nothing else.
    """
    group = processes()
    costs = [[_cost(layers[name]) for name in names] for names in groups]
    owners = _deal(costs, [_factor_cost(layers[names[0]]) for names in groups], group.count)
    parts = [
        [name for name, owner in zip(names, numbers, strict=True) if owner == group.rank]
        for names, numbers in zip(groups, owners, strict=True)
    ]
    with kept_records(not group.is_first) as records:
        for names in filter(None, parts):
            group.check_others()
            change(names)
    if group.count > 1:
        owned = {
            name: owner
            for names, numbers in zip(groups, owners, strict=True)
            for name, owner in zip(names, numbers, strict=True)
        }
        _share(group, layers, owned, records)


def _cost(layer: FakeQuantizedLayer) -> float:
    """Return about how long it takes to round a layer column by column."""
    return float(layer.weight.numel() * (layer.weight.shape[layer.input_axis] + _SEARCH))


def _factor_cost(layer: FakeQuantizedLayer) -> float:
    """Return about how long it takes to factor the Hessian of the input of a layer."""
    return _FACTOR * float(layer.weight.shape[layer.input_axis]) ** 3


def _deal(costs: Sequence[Sequence[float]], extras: Sequence[float], count: int) -> list[list[int]]:
    """Return a process for each cost: the largest first, each where the load is least with it.

    Example: costs (4, 4) with the extra 1, and (5,) with the extra 2, in two processes. The 5 goes
    to process 0, whose load is 7. A 4 goes to process 1, whose load is 5. The other 4 goes there
    too, where its extra is paid already: loads of 7 and 9, instead of 12 and 5.

    Args:
        costs: Costs of the members of each group.
        extras: Cost of a group in each process that has a member of it.
        count: Number of processes.
    """
    loads = [0.0] * count
    owners = [[-1] * len(members) for members in costs]
    items = [(cost, g, i) for g, members in enumerate(costs) for i, cost in enumerate(members)]
    for cost, g, i in sorted(items, key=lambda item: (-item[0], *item[1:])):
        added = [cost + (extras[g] if n not in owners[g] else 0.0) for n in range(count)]
        owner = min(range(count), key=lambda n: loads[n] + added[n])
        owners[g][i] = owner
        loads[owner] += added[owner]
    return owners


def _share(
    group: Processes,
    layers: Layers,
    owned: Mapping[str, int],
    records: Records,
) -> None:
    """Give every process the state of the layers of all owners."""
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
