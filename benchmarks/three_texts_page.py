"""Pages of the rows that ``three_texts.py`` kept: recipes beside other software, and every row.

    python benchmarks/three_texts_page.py          # writes three_texts.md, and a table in README.md
    python benchmarks/three_texts_page.py --check  # writes nothing; fails if they would change

A recipe is compared with the row of other software that has the least mean logarithm of KL in its
scheme, with or without signed scales, over the texts that the model can read. *Lower by* is the
part of its KL that the recipe does not lose, with the standard error of that over windows, which
are paired. KL is the mean over all parts of the data for calibration that both rows have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from kept_rows import KEPT, Row, kept
from measure import markdown
from row_tables import ROUNDING, label, mean_log
from scores import standard_error

from quark.torch.quantization.config.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = KEPT.with_suffix(".md"), ROOT / "README.md"
BEGIN, END = "<!-- recipes -->\n", "<!-- end -->"
REAL = "real"
FINISH, STEPS = "distill", 40
# Its layers of 576 inputs have no groups of 128. Scheme of a recipe -> scheme of its rows there.
IN_64 = {f"int{bits}_wo_signed_128": f"int{bits}_wo_signed_64" for bits in (4, 3)}
NAMES = {
    REAL: "SmolLM2-135M-Instruct",
    "shipped": "the shipped model, a Llama of 4.2 million parameters",
    "twin": "its twin, in which a few channels are 24 times as large",
    "second": "a GPT-2 of four blocks",
    "experts": "a mixture of experts, a Mixtral of four blocks",
}
HEAD = """# Rows of `three_texts.py`

`three_texts_page.py` writes this page from `three_texts.json`. [README.md](README.md#three-texts)
says how the rows are measured. KL is in millinats, with its standard error over windows, and with
perplexity in brackets. Without algorithms, weights are rounded alone. *Inputs alone* leaves weights
in float, as schemes that end in `:inputs` do. `distill` has 40 steps. *Part* is the part of the
docstrings that calibration reads, the first one if none is named; recipes are means over the
*parts* that were measured of both sides. CPU seconds are of one thread, on
several processors beside other programs: ours : theirs.

"""


class Line(NamedTuple):
    """The row of a recipe, a mean over parts of the data, and the rows that it is compared with."""

    name: str
    parts: int
    row: Row
    rounding: Row | None
    inputs: Row | None
    rival: Row | None


class Model:
    """The kept rows of a model, and the texts that it can read.

    Texts on which the float model is worse than a uniform guess say nothing of a loss.
    """

    def __init__(self, name: str, kept_model: dict[str, Any]) -> None:
        self.name, self.base = name, kept_model["float"]
        self.texts = [t for t, found in self.base.items() if found < kept_model["vocabulary"]]
        self.rows: list[Row] = [
            row | {"texts": {text: row["texts"][text] for text in self.texts}}
            for row in kept_model["rows"]
        ]

    def lines(self) -> Iterator[Line]:
        """Yield what the tables tell of each recipe that was measured, and of it with a finish."""
        for name, (scheme, algorithms) in RECIPES.items():
            own, finish = self._scheme(scheme), {"name": FINISH, "iters": STEPS}
            before = [options for options in algorithms if options["name"] not in ROUNDING]
            inputs = self._parts(f"{own}:inputs", before) or self._parts(f"{own}:inputs", [])
            rivals = self._rivals(own)
            for words, steps in ((f"`{name}`", []), (f"`{name}`, `{FINISH}`", [finish])):
                rows = self._parts(own, [*algorithms, *steps])
                shared = sorted(rows.keys() & rivals.keys()) or sorted(rows)
                if rows:
                    row = _mean_row([rows[part] for part in shared])
                    theirs = [rivals[part] for part in shared if part in rivals]
                    others = [[*self._parts(own, []).values()], [*inputs.values()], theirs]
                    yield Line(
                        words, len(shared), row, *(_mean_row(r) if r else None for r in others)
                    )

    def _rivals(self, scheme: str) -> dict[int, Row]:
        """Return the best row of other software in a scheme, with or without signed scales.

        The best one is that of the first part of the data.
        """
        names = (scheme, scheme.replace("_signed", ""))
        rows = [row for row in self.rows if row["scheme"] in names and "software" in row]
        first = [row for row in rows if not row.keys() & {"part", "sampled"}]
        best = min(first, key=mean_log, default=None)
        return self._parts(best["scheme"], best["algorithms"], best["software"]) if best else {}

    def _scheme(self, scheme: str) -> str:
        return IN_64.get(scheme, scheme) if self.name == REAL else scheme

    def _parts(
        self, scheme: str, algorithms: list[Any], software: str | None = None
    ) -> dict[int, Row]:
        """Return the rows of one way to quantize, by the part of the data that calibrates."""
        wanted = (scheme, algorithms, software, None)
        keys = ("scheme", "algorithms", "software", "sampled")
        rows = [row for row in self.rows if tuple(map(row.get, keys)) == wanted]
        return {row.get("part", 0): row for row in rows}


def _mean_row(found: Sequence[Row]) -> Row:
    """Return the means of rows over the parts of the data."""
    texts = {}
    for text in found[0]["texts"]:
        parts = [row["texts"][text] for row in found]
        kl = [mean(values) for values in zip(*(part["kl"] for part in parts), strict=True)]
        texts[text] = {"kl": kl, "perplexity": mean(part["perplexity"] for part in parts)}
    return found[0] | {"texts": texts, "seconds": mean(row["seconds"] for row in found)}


def kl_of(row: Row, text: str) -> torch.Tensor:
    """Return the KL of each window of a text, millinats, (windows,)."""
    return torch.tensor(row["texts"][text]["kl"])


def short(value: float) -> str:
    """Return a figure with two digits at least: ``0.09``, ``2.7``, ``73``, ``1157``."""
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f}"


def with_error(values: torch.Tensor) -> str:
    """Return a mean and its standard error, such as ``2.73 ± 0.04`` or ``72.9 ± 2.8``."""
    digits = 2 if values.mean() < 10 else 1
    return f"{float(values.mean()):.{digits}f} ± {standard_error(values):.{digits}f}"


def below(row: Row, other: Row, text: str) -> tuple[float, float]:
    """Return by what part of the KL of another row a row is below it, and the standard error."""
    mine, others = kl_of(row, text), kl_of(other, text)
    ratio = mine.mean() / others.mean()
    return float(1 - ratio), standard_error(mine - ratio * others) / float(others.mean())


def made_by(row: Row) -> str:
    """Return the software of a row, its algorithms and its part of the data."""
    return f"{'' if 'software' in row else 'quark: '}{label(row)}"


def listed(row: Row | None, texts: Sequence[str]) -> str:
    """Return the KL on each text, such as ``73, 97, 369``."""
    return "–" if row is None else ", ".join(short(float(kl_of(row, t).mean())) for t in texts)


def perplexity(row: Row, text: str) -> str:
    """Return the perplexity on a text with three digits at least: ``9.77``, ``26.9``, ``1726``."""
    value = row["texts"][text]["perplexity"]
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def perplexities(row: Row | None, texts: Sequence[str]) -> str:
    """Return the perplexity on each text, such as ``26.9, 10.2, 16.7``."""
    return "–" if row is None else ", ".join(perplexity(row, t) for t in texts)


def lower(line: Line, texts: Sequence[str], *, errors: bool) -> str:
    """Return by what part a recipe is below the best of others on each text, in percent."""
    if line.rival is None:
        return "–"
    parts = [below(line.row, line.rival, text) for text in texts]
    return ", ".join(f"{100 * p:.0f}{f' ± {100 * e:.0f}' if errors else ''} %" for p, e in parts)


def recipe_table(model: Model, *, whole: bool) -> str:
    """Return the table of recipes of a model beside the best of others, without a heading.

    Args:
        model: The model.
        whole: Whether it has standard errors, inputs alone and perplexity too.
    """
    texts, rows = model.texts, []
    for line in model.lines():
        rival = line.rival
        seconds = [short(row["seconds"]) for row in (line.row, rival) if row is not None]
        cells = {"recipe": line.name, "KL": listed(line.row, texts)}
        cells["rounding alone"] = listed(line.rounding, texts)
        if whole:
            cells = {"recipe": line.name, "parts": str(line.parts), **cells}
            cells["inputs alone"] = listed(line.inputs, texts)
        cells["best of others"] = "–" if rival is None else label(rival)
        cells["its KL"] = listed(rival, texts)
        cells["lower by"] = lower(line, texts, errors=whole)
        if whole:
            cells["perplexity"] = perplexities(line.row, texts)
            cells["its perplexity"] = perplexities(rival, texts)
        cells["CPU s"] = " : ".join(seconds)
        rows.append(cells)
    return markdown("", list(rows[0]), [[*cells.values()] for cells in rows]).partition("\n\n")[2]


def page(models: Sequence[Model]) -> str:
    """Return the page of all rows."""
    return HEAD + "\n".join(map(section, models))


def section(model: Model) -> str:
    """Return the part of the page that has the rows of a model."""
    texts = model.texts
    rows = sorted(model.rows, key=lambda row: (row["scheme"], mean_log(row)))
    columns = ["scheme", "way", *texts, "CPU s"]
    lines = []
    for row in rows:
        cells = [f"{with_error(kl_of(row, t))} ({perplexity(row, t)})" for t in texts]
        lines.append([row["scheme"], made_by(row), *cells, short(row["seconds"])])
    base = ", ".join(f"{model.base[text]:.4g} ({text})" for text in texts)
    windows = len(kl_of(rows[0], texts[0]))
    return "\n".join(
        [
            f"## {NAMES[model.name][0].upper()}{NAMES[model.name][1:]}",
            "",
            f"{windows} windows of each text. Perplexity in float: {base}. KL in this order:",
            "",
            recipe_table(model, whole=True),
            markdown("All rows, the best of a scheme first", columns, lines),
        ]
    )


def contents() -> dict[Path, str]:
    """Return the text of each file.

    Raises:
        ValueError: README has no place for its table.
    """
    models = {name: Model(name, found) for name, found in kept().items()}
    before, begin, rest = README.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README} has no {BEGIN.strip()} … {END} for the table of recipes")
    table = recipe_table(models[REAL], whole=False)
    ordered = [models[name] for name in NAMES if name in models]
    return {PAGE: page(ordered), README: f"{before}{begin}\n{table}{end}{after}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a change")
    check = parser.parse_args().check
    stale = []
    for path, text in contents().items():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if not check:
            path.write_text(text, "utf-8", newline="\n")
    if check and stale:
        sys.exit(f"Run `python benchmarks/three_texts_page.py`: {', '.join(stale)} would change.")
    print(f"{'Written' if stale else 'Unchanged'}: {', '.join(stale) or PAGE.name}")


if __name__ == "__main__":
    main()
