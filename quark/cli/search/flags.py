"""The flags of ``quark search``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quark.cli.collect import DataFlags
from quark.cli.options import EVAL_WINDOWS, Json, panel, parse_size

_search, _output, _evaluation = panel("Search"), panel("Output"), panel("Evaluation")


@dataclass(frozen=True, kw_only=True)
class SearchRequest(DataFlags):
    """The flags of ``quark search``; see its help."""

    target_bits: Annotated[
        float | None,
        _search(metavar="X", min=1.0, help="Maximum bits per weight, scales included."),
    ] = None
    target_size: Annotated[
        int | None,
        _search(
            metavar="SIZE",
            parser=parse_size,
            help="Instead: maximum size of the checkpoint, such as 4GB, with what stays in float.",
        ),
    ] = None
    target_read: Annotated[
        int | None,
        _search(
            metavar="SIZE",
            parser=parse_size,
            help="Instead: maximum size of the weights that a token reads, which limits tokens per "
            "second. Of experts, these are the ones that the router chooses.",
        ),
    ] = None
    target_ms: Annotated[
        float | None,
        _search(
            metavar="X",
            min=0.0,
            help="Instead: maximum milliseconds of a token in the layers that get formats. Each "
            "shape and format is measured on this machine, in the runtime of --runtime.",
        ),
    ] = None
    runtime: Annotated[
        str | None,
        _search(
            metavar="NAME",
            help="How layers compute that --target_ms measures: exact, auto, fast (default), "
            "compiled or unpacked.",
        ),
    ] = None
    max_perplexity_increase: Annotated[
        float | None,
        _search(
            metavar="X",
            min=0.0,
            help="Instead: the smallest mixture that raises the perplexity, rounded to nearest, by "
            "at most this percentage.",
        ),
    ] = None
    formats: Annotated[
        str | None,
        _search(
            metavar="A,B,C",
            help="Schemes to choose from, for weights or for weights and inputs, separated by "
            "commas.",
        ),
    ] = None
    together: Annotated[
        bool,
        _search(
            help="Give layers that share an input (query, key, value; gate, up) one format, for "
            "software that fuses them.",
        ),
    ] = False
    exclude_layers: Annotated[
        list[str] | None, _search(metavar="PATTERN …", help="Layers that stay in float.")
    ] = None
    statistics: Annotated[
        Path | None,
        _search(
            metavar="DIR",
            help="Statistics of 'quark collect' (default: collect first).",
        ),
    ] = None
    quant_algo: Annotated[
        list[str] | None,
        _search(metavar="NAME,…", help="Algorithms to write into the file, such as qronos."),
    ] = None
    output: Annotated[Path, _output(metavar="FILE", help="Configuration to write.")] = Path(
        "mixed.json"
    )
    picture: Annotated[
        Path | None, _output(metavar="FILE", help="SVG of loss over size to write.")
    ] = None
    overwrite: Annotated[bool, _output(help="Replace these files.")] = False
    eval_data: Annotated[
        str | None,
        _evaluation(
            metavar="FILE|NAME", help="Text to measure perplexity on, as for --dataset; held-out."
        ),
    ] = None
    num_eval_data: Annotated[
        int, _evaluation(metavar="N", min=0, help="Maximum number of windows (0 = all).")
    ] = EVAL_WINDOWS
    skip_evaluation: Annotated[bool, _evaluation(help="Measure nothing.")] = False
    as_json: Json = False
    given: frozenset[str] = frozenset()
