"""Reports and comparisons as HTML pages that need no network: numbers, charts, what draws them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from quark.torch.evaluation.scripts import describe_scripts

PACKAGES = ("jinja2", "plotly")


def check_installed() -> None:
    """Raise if what pages are made with is not installed.

    Raises:
        ImportError: plotly or jinja2 is missing.
    """
    for name in PACKAGES:
        if find_spec(name) is None:
            raise ImportError(
                f"The page of a report needs {name}: pip install {' '.join(PACKAGES)} (or install "
                'this package with its "report" extra). --json prints the same numbers without it.'
            )


def page(report: dict[str, Any]) -> str:
    """Return a page that shows a report.

    Args:
        report: What ``Report.to_dict`` returns, which the page holds as well.

    Raises:
        ImportError: plotly or jinja2 is missing.
    """
    return _render("page.html.jinja", report, floats=_floats(report))


def comparison_page(comparison: dict[str, Any]) -> str:
    """Return a page that shows models side by side.

    Args:
        comparison: What ``Comparison.to_dict`` returns, which the page holds as well.

    Raises:
        ImportError: plotly or jinja2 is missing.
    """
    return _render("comparison.html.jinja", comparison)


def _render(template: str, report: dict[str, Any], **more: Any) -> str:
    check_installed()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

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
        "scripts": describe_scripts,
    }
    page = environment.get_template(template)
    return page.render(report=report, plotly=Markup(get_plotlyjs()), **more)


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
