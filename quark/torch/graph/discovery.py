"""Discovery of the structure of a model: trace one pass, propose candidates, prove each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.rescaling.proof import prove_groups
from quark.torch.graph.rescaling.proposal import propose_groups
from quark.torch.graph.rotation.proof import prove_stream, prove_value_heads
from quark.torch.graph.rotation.residual_stream import (
    Analysis,
    ObstacleError,
    check_all_read,
    find_down_projections,
    find_stream,
    find_value_heads,
)
from quark.torch.graph.rotation.vector_flow import VectorFlow
from quark.torch.graph.shared_inputs import record_shared_inputs
from quark.torch.graph.structure import (
    RESCALING,
    ROTATION,
    Rejection,
    RescalingGroup,
    ResidualStream,
    Structure,
    ValueHeads,
)
from quark.torch.graph.trace import Trace, trace
from quark.torch.graph.units import find_units
from quark.torch.graph.unreached import (
    Counterparts,
    Unread,
    extend_group,
    find_counterparts,
    find_unread_weights,
    reject_unread_readers,
)


def discover(
    model: nn.Module, inputs: Any, proves: Collection[str] = (RESCALING, ROTATION)
) -> Structure:
    """Find the parameters of a model that can be rescaled or rotated, for any architecture.

    One forward pass is traced, candidates are derived from the trace, and each is proved by running
    parts of the model again. A few dozen tokens are enough. Experts without tokens are treated like
    the experts of the same layer with tokens.

    Args:
        model: Any model. Its parameters and buffers have the same bits afterwards.
        inputs: A tensor, a tuple of arguments, a mapping of keyword arguments, or a function
            without arguments that runs the model once.
        proves: What to look for besides blocks and shared inputs: groups of parameters that can
            be rescaled (``RESCALING``), and the stream and heads that can be rotated
            (``ROTATION``).

    Raises:
        ValueError: The pass used no parameter of the model, or the model is packed.
    """
    _check_unpacked(model)
    run = _make_runner(model, inputs)
    with eval_mode(model), torch.no_grad():
        with record_shared_inputs(model) as shared:
            record = trace(model, run)
        aliases = Aliases(record)
        if not aliases.readers:
            raise ValueError(
                f"No parameter of {type(model).__name__} was used. Give inputs for the model, or "
                "a function that runs it."
            )
        counterparts = find_counterparts(model, aliases.readers)
        unread = find_unread_weights(model, record.blocks, aliases.readers, counterparts)
        proved, rejected = (
            _find_groups(model, run, record, aliases, counterparts, unread)
            if RESCALING in proves
            else ([], [])
        )
        rotation = (
            _find_rotation(model, run, record, aliases, counterparts, unread)
            if ROTATION in proves
            else _Rotation(None, "rotations were not looked for", (), ())
        )
    first = {n.rpartition(".")[0]: i[0] for n, i in reversed(aliases.readers.items())}
    proved.sort(key=lambda group: first[group.producer])
    return Structure(
        blocks=tuple(record.blocks),
        groups=tuple(
            extended for group in proved for extended in extend_group(group, counterparts)
        ),
        rejected=tuple(sorted(rejected, key=lambda r: first[r.producer])),
        shared_inputs=shared.groups(),
        stream=rotation.stream,
        obstacle=rotation.obstacle,
        value_heads=rotation.values,
        down_projections=rotation.down_projections,
        units=tuple(find_units(model, record)),
    )


def _check_unpacked(model: nn.Module) -> None:
    """Refuse a model whose weights are codes, which can be neither rescaled nor rotated.

    Raises:
        ValueError: The message names the first such layer.
    """
    for name, module in model.named_modules():
        if hasattr(module, "unpack_parameter"):
            raise ValueError(
                f"The structure of a packed model cannot be found: {name} holds codes. Load the "
                "checkpoint in float, by import_model_from_safetensors(…, dequantize=True)."
            )


def _find_groups(
    model: nn.Module,
    run: Callable[[], object],
    record: Trace,
    aliases: Aliases,
    counterparts: Counterparts,
    unread: Unread,
) -> tuple[list[RescalingGroup], list[Rejection]]:
    """Return the proved groups, and what cannot be rescaled."""
    candidates, rejected = propose_groups(record, aliases)
    candidates, unclear = reject_unread_readers(candidates, unread)
    proved, failed = prove_groups(model, run, record.blocks, candidates, counterparts)
    return proved, [*rejected, *unclear, *failed]


class _Rotation(NamedTuple):
    """What can be rotated; see ``Structure``."""

    stream: ResidualStream | None
    obstacle: str
    values: tuple[ValueHeads, ...]
    down_projections: tuple[str, ...]


def _find_rotation(
    model: nn.Module,
    run: Callable[[], object],
    record: Trace,
    aliases: Aliases,
    counterparts: Counterparts,
    unread: Unread,
) -> _Rotation:
    """Return what can be rotated, proved."""
    analysis = Analysis(record, aliases, VectorFlow(record, aliases), counterparts)
    stream: ResidualStream | None = None
    obstacle = ""
    try:
        candidate, carried = find_stream(analysis)
        check_all_read(candidate, unread)
        prove_stream(model, run, record.blocks, candidate, carried)
        stream = candidate
    except ObstacleError as error:
        obstacle = str(error)
    values = (
        stream.value_heads
        if stream
        else prove_value_heads(model, record.blocks, find_value_heads(analysis))
    )
    return _Rotation(stream, obstacle, values, find_down_projections(analysis, values))


def _make_runner(model: nn.Module, inputs: Any) -> Callable[[], object]:
    if isinstance(inputs, torch.Tensor):
        return lambda: model(inputs)
    if isinstance(inputs, Mapping):
        return lambda: model(**inputs)
    if callable(inputs):
        return inputs  # type: ignore[no-any-return]
    return lambda: model(*inputs)
