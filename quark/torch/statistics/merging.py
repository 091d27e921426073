"""Statistics of parts of the data, put together to those of all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch

from quark.torch.pipeline.accumulators import Draw, Gram
from quark.torch.pipeline.batches import progress
from quark.torch.pipeline.statistics import Probe, Statistics, differing, digest, place
from quark.torch.pipeline.tensor_ranges import TensorRange
from quark.torch.statistics.collection import TOKENS


def merge_statistics(statistics: Iterable[Statistics]) -> Statistics:
    """Put statistics of parts of the data together: what collecting on all of it gives.

    Sums of inputs are the same but for rounding; ranges and histograms, to the bit. Each part gives
    its share of the tokens that are kept. Sensitivities are those of the calls that all parts were
    measured on. The order of parts does not matter. The result is held in memory; of parts on disk
    one tensor at a time is.

    Args:
        statistics: What was collected with each part of the data, of one model.

    Raises:
        ValueError: There are none; they are of different models or layers, or two of the same data;
            or some have sensitivities and others have not.
    """
    parts = list(statistics)
    _check(parts)
    if len(parts) == 1:
        return parts[0]
    first, *_ = parts = sorted(parts, key=lambda part: part.data)
    readers = _readers(parts)
    inputs = {
        name: _gram(parts, name)
        for name in progress(list(dict.fromkeys(readers.values())), "merging sums")
    }
    places = [(name, "input_tensors") for name in inputs]
    places += [(name, "output_tensors") for name in readers]
    ranges = {place(*at): _range(parts, *at) for at in progress(places, "merging ranges")}
    return Statistics(
        first.model,
        digest(*(part.data for part in parts)),
        readers,
        inputs,
        {name: gram.tokens for name, gram in inputs.items()},
        first.units,
        {name: _probe(parts, name) for name in first.probes},
        {name: _sample(parts, name) for name, gram in inputs.items() if gram.tokens},
        {name: kept for name, kept in ranges.items() if not kept.is_empty},
    )


def _check(parts: Sequence[Statistics]) -> None:
    """Raise if parts do not belong together.

    Raises:
        ValueError: They do not; which of them is told, counted from 1.
    """
    if not parts:
        raise ValueError("There are no statistics to merge: give those of each part of the data.")
    first, seen = parts[0], dict[str, int]()
    for number, part in enumerate(parts, 1):
        for what, others in (
            ("tensors of the model", differing(first.model, part.model)),
            ("units of layers", differing(_unit_of(first), _unit_of(part))),
        ):
            if others:
                raise ValueError(
                    f"Statistics 1 and {number} differ in {len(others)} {what}, such as "
                    f"{others[0]}: merge those of one model, loaded in one type."
                )
        if first.probes.keys() != part.probes.keys():
            raise ValueError(
                f"One of statistics 1 and {number} has sensitivities and the other has not: "
                "collect all with probes, or all with probes=0."
            )
        if part.data in seen:
            raise ValueError(
                f"Statistics {seen[part.data]} and {number} are of the same data, which would "
                "count twice: collect each with a part of its own."
            )
        seen[part.data] = number


def _unit_of(part: Statistics) -> dict[str, str]:
    """Return the first layer of the unit of each layer."""
    return {name: unit[0] for unit in part.units for name in unit}


def _readers(parts: Sequence[Statistics]) -> dict[str, str]:
    """Return the first of the layers that read the same tensor, for each layer.

    What experts share is found where the data reaches them, which is not in all parts.
    """
    order = {name: index for index, name in enumerate(parts[0].readers)}
    readers: dict[str, str] = {}
    for name in order:
        earliest = min((part.readers[name] for part in parts), key=order.__getitem__)
        readers[name] = readers.get(earliest, earliest)
    return readers


def _gram(parts: Iterable[Statistics], name: str) -> Gram:
    merged = Gram()
    for part in parts:
        merged.merge(part.inputs[part.readers[name]])
    return merged


def _range(parts: Iterable[Statistics], name: str, tensor: str) -> TensorRange:
    merged = TensorRange()
    for part in parts:
        merged.merge(part.range_of(name, tensor))
    return merged


def _probe(parts: Iterable[Statistics], name: str) -> Probe:
    divergences, tokens, errors = zip(*(part.probes[name] for part in parts), strict=True)
    return Probe(sum(divergences), sum(tokens), sum(errors))


def _sample(parts: Sequence[Statistics], name: str) -> torch.Tensor:
    """Return as many tokens of each part as it has among all, evenly drawn from those it kept."""
    counts = list(accumulate((part.tokens[part.readers[name]] for part in parts), initial=0.0))
    size = min(TOKENS, counts[-1])
    ends = [round(size * count / counts[-1]) for count in counts]
    found = []
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        sample = part.sample(name) if end > start else None
        if sample is not None:
            draw = Draw(end - start)
            draw(sample)
            assert draw.tokens is not None
            found.append(draw.tokens)
    return torch.cat(found)
