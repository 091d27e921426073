"""The structure of a model, found by running it once and proved by running parts of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.eval_mode import at_inference
from quark.torch.graph.rescaling.proof import prove
from quark.torch.graph.rescaling.proposal import propose, shared_inputs
from quark.torch.graph.rotation.proof import prove_stream, prove_values
from quark.torch.graph.rotation.residual_stream import (
    ObstacleError,
    Seen,
    expect_read,
    find_ends,
    find_stream,
    find_values,
)
from quark.torch.graph.rotation.vectors import Follower
from quark.torch.graph.structure import ResidualStream, Structure
from quark.torch.graph.trace import trace
from quark.torch.graph.unreached import (
    extended,
    unread_weights,
    unseen_siblings,
    without_unread_readers,
)


def discover(model: nn.Module, inputs: Any) -> Structure:
    """Find what can be rescaled in a model, whatever its architecture.

    One forward pass is traced, candidates are read off the trace and each is proved. A few dozen
    tokens are enough; experts that none of them reaches are treated like those of the same layer
    which are reached.

    Args:
        model: Any model. It is unchanged in the end, bit by bit.
        inputs: A tensor, a tuple of arguments, a mapping of keyword arguments, or a function
            without arguments that runs the model once.

    Raises:
        ValueError: Nothing was computed with the parameters of the model.
    """
    run = _runner(model, inputs)
    with at_inference(model), torch.no_grad():
        seen = trace(model, run)
        aliases = Aliases(seen)
        if not aliases.readers:
            raise ValueError(
                f"No parameter of {type(model).__name__} was used. Give inputs for the model, or "
                "a function that runs it."
            )
        candidates, rejected = propose(seen, aliases)
        siblings = unseen_siblings(model, aliases.readers)
        unread = unread_weights(model, seen.blocks, aliases.readers, siblings)
        candidates, unclear = without_unread_readers(candidates, unread)
        proved, failed = prove(model, run, seen.blocks, candidates, siblings)
        whole = Seen(seen, aliases, Follower(seen, aliases), siblings)
        stream: ResidualStream | None = None
        obstacle = ""
        try:
            found, carried = find_stream(whole)
            expect_read(found, unread)
            prove_stream(model, run, seen.blocks, found, carried)
            stream = found
        except ObstacleError as error:
            obstacle = str(error)
        values = stream.values if stream else prove_values(model, seen.blocks, find_values(whole))
    rejected += [*unclear, *failed]
    first = {n.rpartition(".")[0]: i[0] for n, i in reversed(aliases.readers.items())}
    proved.sort(key=lambda group: first[group.producer])
    return Structure(
        blocks=tuple(seen.blocks),
        groups=tuple(more for group in proved for more in extended(group, siblings)),
        rejected=tuple(sorted(rejected, key=lambda r: first[r.producer])),
        shared_inputs=shared_inputs(seen, aliases),
        stream=stream,
        obstacle=obstacle,
        values=values,
        downs=find_ends(whole, values),
    )


def _runner(model: nn.Module, inputs: Any) -> Callable[[], object]:
    if isinstance(inputs, torch.Tensor):
        return lambda: model(inputs)
    if isinstance(inputs, Mapping):
        return lambda: model(**inputs)
    if callable(inputs):
        return inputs  # type: ignore[no-any-return]
    return lambda: model(*inputs)
