"""Reports and comparisons as HTML pages that need no network: numbers, charts, what draws them.

A page holds its numbers and plotly.js compressed, as text. The browser inflates both.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any

from quark.torch.evaluation.scripts import describe_scripts
from quark.torch.report.advice import few_windows

# The bundle of plotly.js with scatter, bar and pie, as npm's plotly.js-basic-dist-min has it.
PLOTLY = "plotly/plotly-basic-4.1.1.min.js.gz"
GENERATOR = "quark"  # what wrote a page, in its head
_HEAD = 4096  # bytes of a page that hold this name


def page(report: dict[str, Any]) -> str:
    """Return a page that shows a report.

    Args:
        report: What ``Report.to_dict`` returns, which the page holds as well.
    """
    return _render("page.html.jinja", report, floats=_floats(report))


def comparison_page(comparison: dict[str, Any], generator: str = GENERATOR) -> str:
    """Return a page that shows models side by side.

    Args:
        comparison: What ``Comparison.to_dict`` returns, which the page holds as well.
        generator: What writes the page, for ``is_page``.
    """
    return _render("comparison.html.jinja", comparison, generator)


def is_page(path: Path, generator: str) -> bool:
    """Whether a file is a page that ``generator`` wrote.

    Raises:
        OSError: It cannot be read.
    """
    mark = f'<meta name="generator" content="{generator}">'.encode()
    with path.open("rb") as file:
        return mark in file.read(_HEAD)


def _render(template: str, report: dict[str, Any], generator: str = GENERATOR, **more: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("quark.torch.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "percent": _percent,
        "decimals": _decimals,
        "few_windows": few_windows,
        "scripts": describe_scripts,
    }
    numbers = gzip.compress(json.dumps(report).encode(), mtime=0)  # the same bytes at any time
    return environment.get_template(template).render(
        report=report, generator=generator, numbers=_text(numbers), plotly=_text(_plotly()), **more
    )


def _plotly() -> bytes:
    """Return plotly.js, compressed with gzip."""
    return files("quark.torch.report").joinpath(PLOTLY).read_bytes()


def _text(compressed: bytes) -> str:
    return b64encode(compressed).decode()


def _floats(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is not quantized by kind and reason, the largest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for part in report["floats"]:
        key = part["kind"], part["reason"]
        empty = {"kind": key[0], "reason": key[1], "names": [], "parameters": 0, "bytes": 0}
        group = found.setdefault(key, empty)
        group["names"].append(part["name"])
        group["parameters"] += part["parameters"]
        group["bytes"] += part["bytes"]
    return sorted(found.values(), key=lambda group: -group["bytes"])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _decimals(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
