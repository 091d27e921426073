"""Merge statistics of parts of the data into statistics of all data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from quark.torch.pipeline.accumulators import Gram, TokenSample
from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.statistics import Probe, Statistics, differing_names, digest, tensor_key
from quark.torch.pipeline.tensor_ranges import TensorRange
from quark.torch.statistics.collection import TOKENS


def merge_statistics(statistics: Iterable[Statistics]) -> Statistics:
    """Merge statistics of parts of the data; the result is that of collecting on all data.

    Sums of inputs agree up to rounding errors; ranges and histograms agree exactly. The sample of
    tokens has the share of each part. Sensitivities are those over the calls of all parts. The
    order of parts does not matter. Memory holds the result and one tensor of a part on disk.

    Args:
        statistics: Statistics of one model, each collected with one part of the data.

    Raises:
        ValueError: There are no statistics; they are of different models or layers, or two are of
            the same data; or only some have sensitivities.
    """
    parts = list(statistics)
    _check(parts)
    if len(parts) == 1:
        return parts[0]
    first, *_ = parts = sorted(parts, key=lambda part: part.data)
    readers = _merge_readers(parts)
    inputs = {
        name: _merge_grams(parts, name)
        for name in show_progress(list(dict.fromkeys(readers.values())), "merging sums")
    }
    tensors = [(name, "input_tensors") for name in inputs]
    tensors += [(name, "output_tensors") for name in readers]
    ranges = {
        tensor_key(name, tensor): _merge_ranges(parts, name, tensor)
        for name, tensor in show_progress(tensors, "merging ranges")
    }
    return Statistics(
        first.model,
        digest(*(part.data for part in parts)),
        readers,
        inputs,
        {name: gram.tokens for name, gram in inputs.items()},
        first.units,
        _merge_probes([part.probes for part in parts]),
        {name: _merge_samples(parts, name) for name, gram in inputs.items() if gram.tokens},
        {key: tensor for key, tensor in ranges.items() if not tensor.is_empty},
        _merge_letters(parts),
        _merge_probes([part.fine_probes for part in parts]),
    )


def _check(parts: Sequence[Statistics]) -> None:
    """Raise if parts cannot be merged.

    Raises:
        ValueError: Two parts do not match; the message numbers them from 1.
    """
    if not parts:
        raise ValueError(
            "There are no statistics to merge: give the statistics of each part of the data."
        )
    first, numbers = parts[0], dict[str, int]()
    for number, part in enumerate(parts, 1):
        for what, others in (
            ("tensors of the model", differing_names(first.model, part.model)),
            ("units of layers", differing_names(_map_units(first), _map_units(part))),
        ):
            if others:
                raise ValueError(
                    f"Statistics 1 and {number} differ in {len(others)} {what}, such as "
                    f"{others[0]}: merge statistics of one model, loaded in one type."
                )
        if first.probes.keys() != part.probes.keys():
            raise ValueError(
                f"One of statistics 1 and {number} has sensitivities and the other has not: "
                "collect all with probes, or all with probes=0."
            )
        if part.data in numbers:
            raise ValueError(
                f"Statistics {numbers[part.data]} and {number} are of the same data, which would "
                "count twice: collect each with a part of its own."
            )
        numbers[part.data] = number


def _map_units(part: Statistics) -> dict[str, str]:
    """Return the first layer of the unit of each layer."""
    return {name: unit[0] for unit in part.units for name in unit}


def _merge_readers(parts: Sequence[Statistics]) -> dict[str, str]:
    """Map each layer to the first of the layers that read the same tensor in any part.

    A part does not show that layers of an expert share an input if no token reached the expert.
    """
    order = {name: index for index, name in enumerate(parts[0].readers)}
    readers: dict[str, str] = {}
    for name in order:
        earliest = min((part.readers[name] for part in parts), key=order.__getitem__)
        readers[name] = readers.get(earliest, earliest)
    return readers


def _merge_letters(parts: Sequence[Statistics]) -> dict[str, int]:
    """Return the letters of all parts; none if those of a part are not known."""
    if not all(part.letters for part in parts):
        return {}
    return dict(sum((Counter(part.letters) for part in parts), Counter[str]()))


def _merge_grams(parts: Iterable[Statistics], name: str) -> Gram:
    merged = Gram()
    for part in parts:
        merged.merge(part.inputs[part.readers[name]])
    return merged


def _merge_ranges(parts: Iterable[Statistics], name: str, tensor: str) -> TensorRange:
    merged = TensorRange()
    for part in parts:
        merged.merge(part.range_of(name, tensor))
    return merged


def _merge_probes(parts: Sequence[Mapping[str, Probe]]) -> dict[str, Probe]:
    """Return the sums of probes, without those that a part lacks."""
    merged = {}
    for name in parts[0]:
        if all(name in part for part in parts):
            divergences, tokens, errors = zip(*(part[name] for part in parts), strict=True)
            merged[name] = Probe(sum(divergences), sum(tokens), sum(errors))
    return merged


def _merge_samples(parts: Sequence[Statistics], name: str) -> torch.Tensor:
    """Return a sample of tokens; each part contributes in proportion to its number of tokens."""
    # Example: parts of 300 and 100 tokens, TOKENS = 8: counts 0, 300, 400, ends 0, 6, 8. The first
    # part contributes 6 tokens of its own sample, the second 2.
    counts = list(accumulate((part.tokens[part.readers[name]] for part in parts), initial=0.0))
    size = min(TOKENS, counts[-1])
    ends = [round(size * count / counts[-1]) for count in counts]
    tokens = []
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        sample = part.sample(name) if end > start else None
        if sample is not None:
            subsample = TokenSample(end - start)
            subsample(sample)
            assert subsample.tokens is not None
            tokens.append(subsample.tokens)
    return torch.cat(tokens)
