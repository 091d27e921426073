"""Budgets of ``quark search``: their checks, and the mixture that each of them chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from quark.cli import console
from quark.cli.console import format_bytes
from quark.cli.options import in_words
from quark.cli.quantize.plan import round_up
from quark.cli.search.flags import SearchRequest

if TYPE_CHECKING:
    from torch import nn

    from quark.cli.search.measurement import Measure
    from quark.torch.quantization.config.layer import QuantizationConfig
    from quark.torch.search.mixtures import Mixture
    from quark.torch.search.sizes import Size
    from quark.torch.search.times import Seconds

TARGETS = ("target_bits", "target_size", "target_read", "target_ms", "max_perplexity_increase")
RUNTIME = "fast"  # unless --runtime names another
GRID = 64  # steps of size that the bisection distinguishes


def check_flags(request: SearchRequest) -> None:
    """Check the flags of the budget against each other.

    Raises:
        typer.BadParameter: There is not exactly one budget, or a flag has nothing to act on.
    """
    if sum(getattr(request, name) is not None for name in TARGETS) != 1:
        flags = [f"--{name}" for name in TARGETS]
        raise console.wrong(flags[0], f"give one of {in_words(flags)}.")
    if request.max_perplexity_increase is not None and request.skip_evaluation:
        raise console.wrong(
            "--skip_evaluation",
            "the perplexity is needed for --max_perplexity_increase.",
        )
    if request.runtime is not None and request.target_ms is None:
        raise console.wrong("--runtime", "only --target_ms measures layers in a runtime.")
    if request.runtime is not None:
        from quark.torch.quantization.nn.runtime import check_runtime

        try:
            check_runtime(request.runtime)
        except ValueError as error:
            raise console.wrong("--runtime", str(error)) from None


def check_size(request: SearchRequest, formats: Mapping[str, QuantizationConfig]) -> None:
    """Check that codes alone fit the size, before the model is read.

    Raises:
        typer.BadParameter: They do not.
    """
    bits = {n: c.weight.coded.fmt.bits for n, c in formats.items() if c.weight is not None}
    least = min(bits, key=lambda name: bits[name])
    if request.target_bits is not None and request.target_bits < bits[least]:
        raise console.wrong(
            "--target_bits",
            f"{request.target_bits:g} is less than the {bits[least]} bits of {least}, the smallest "
            "format, whose scales need more. Give a larger size, or allow smaller formats.",
        )


def check_reach(
    request: SearchRequest, model: nn.Module, formats: Mapping[str, QuantizationConfig]
) -> None:
    """Check that some mixture can have the size, and that it limits anything, before data runs.

    Raises:
        typer.BadParameter: All mixtures are larger, or smaller.
    """
    from quark.torch.search.sizes import reachable_bits, stored_bytes

    if request.target_bits is not None:
        try:
            least, most = reachable_bits(model, formats, request.exclude_layers or ())
        except ValueError as error:
            raise console.wrong("--formats", str(error)) from None
        if not least <= request.target_bits <= most:
            raise console.wrong(
                "--target_bits",
                f"{request.target_bits:g} is out of reach: {_describe_range(least, most, formats)}",
            )
    for flag in ("target_size", "target_read"):
        size, whole = getattr(request, flag), stored_bytes(model)
        if size is not None and size >= whole:
            raise console.wrong(
                f"--{flag}",
                f"{format_bytes(size)} limits nothing: the float model takes "
                f"{format_bytes(whole)}. Give less.",
            )


def _describe_range(least: float, most: float, formats: Iterable[str]) -> str:
    """Return the range of the bits per weight of some formats, with what to do, as text."""
    names = f"{', '.join(formats)} take"
    low, high = _rounded(least, math.ceil), _rounded(most, math.floor)
    if float(low) >= float(high):
        return f"{names} {least:.5g} bits per weight. Give other --formats."
    return (
        f"of these layers, {names} {low} to {high} bits per weight. Give a number between these, "
        "or other --formats."
    )


def _rounded(bits: float, towards: Callable[[float], int]) -> str:
    return f"{towards(1000 * bits) / 1000:g}"


def measure_seconds(
    request: SearchRequest,
    model: nn.Module,
    formats: Mapping[str, QuantizationConfig],
    device: str,
) -> Seconds | None:
    """Return the seconds of a token in each layer and format; None without ``--target_ms``.

    Raises:
        typer.BadParameter: Even the slowest formats take less time than the budget.
    """
    from quark.torch.search.times import measure_times

    if request.target_ms is None:
        return None
    with console.stage("measuring the time of layers"):
        excluded, runtime = request.exclude_layers or (), request.runtime or RUNTIME
        seconds = measure_times(model, formats, excluded, runtime, device)
    layers = {name for of_layer in seconds.values() for name in of_layer}
    slowest = sum(max(s.get(name, 0.0) for s in seconds.values()) for name in layers)
    if 1e-3 * request.target_ms > slowest:
        raise console.wrong(
            "--target_ms",
            f"{request.target_ms:g} limits nothing: the layers take {1e3 * slowest:.4g} ms or less "
            f"in {', '.join(formats)}. Give less, or other --formats.",
        )
    return seconds


def choose(
    request: SearchRequest,
    mixture: Mixture,
    outside: Size,
    measure: Measure,
    seconds: Seconds | None,
) -> dict[str, str]:
    """Return the format of each layer: the best for a budget, or the smallest within the limit.

    Args:
        request: The flags.
        mixture: The best mixtures of all sizes.
        outside: Size of what is not quantized.
        measure: Measures mixtures.
        seconds: The result of ``measure_seconds``.
    """
    if request.target_ms is not None:
        assert seconds is not None
        return _choose_within_time(mixture, seconds, request.target_ms)
    if request.target_bits is not None:
        return _choose_within_bits(mixture, request.target_bits)
    if request.target_size is not None:
        return _choose_within("--target_size", mixture, request.target_size, outside.stored)
    if request.target_read is not None:
        return _choose_within("--target_read", mixture, request.target_read, outside.read)
    limit = request.max_perplexity_increase
    assert limit is not None
    original = measure.original()
    assert original is not None
    highest = original.perplexity * (1 + limit / 100)
    bits = [bits for bits, _ in mixture.points()]
    steps = [bits[0] + (bits[-1] - bits[0]) * step / GRID for step in range(GRID + 1)]

    def is_within(step: int) -> bool:
        measured = measure.mixture(f"{steps[step]:.2f} bits", mixture.choose(steps[step]))
        assert measured is not None
        return measured.predictions.perplexity <= highest

    low, high = -1, GRID  # above the limit, within the limit
    if not is_within(high):
        raise console.wrong(
            "--max_perplexity_increase",
            f"even the largest mixture, of {bits[-1]:.2f} bits per weight, raises the perplexity "
            f"by more than {limit:g} %. Raise the limit, or add larger --formats.",
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_within(middle) else (middle, high)
    return mixture.choose(steps[high])


def _choose_within_bits(mixture: Mixture, bits: float) -> dict[str, str]:
    """Return the best format of each layer for bits per weight.

    Raises:
        typer.BadParameter: Even the smallest formats that fit take more.
    """
    try:
        return mixture.choose(bits)
    except ValueError as error:
        raise console.wrong("--target_bits", str(error)) from None


def _choose_within_time(mixture: Mixture, seconds: Seconds, budget: float) -> dict[str, str]:
    """Return the best format of each layer for milliseconds of a token.

    Raises:
        typer.BadParameter: Even the fastest formats take longer.
    """
    from quark.torch.search.times import choose_within_time

    try:
        return choose_within_time(mixture.units, seconds, 1e-3 * budget)
    except ValueError as error:
        raise console.wrong("--target_ms", str(error)) from None


def _choose_within(flag: str, mixture: Mixture, size: int, outside: int) -> dict[str, str]:
    """Return the best format of each layer for a size in bytes, with those outside of the layers.

    Raises:
        typer.BadParameter: Even the smallest formats take more.
    """
    least = outside + math.ceil(mixture.least * mixture.weights / 8)
    if size < least:
        raise console.wrong(
            flag,
            f"{size:,} bytes are less than {least:,}, with the smallest formats and the "
            f"{outside:,} that stay in float. Give {flag} "
            f"{round_up(least)}, or allow smaller formats.",
        )
    return mixture.choose((size - outside) * 8 / mixture.weights)
