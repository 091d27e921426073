"""Pages of the rows that ``three_texts.py`` kept: recipes beside other software, and every row.

    python benchmarks/three_texts_page.py          # writes three_texts.md, and a table in README.md
    python benchmarks/three_texts_page.py --check  # writes nothing; fails if they would change

A recipe is compared with the row of other software that has the least mean logarithm of KL in its
scheme, with or without signed scales, over the texts that the model can read. *Below it by* is the
part of its KL that the recipe does not lose, with the standard error of that over windows, which
are paired.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
in float, as schemes that end in `:inputs` do. *Part* is the part of the docstrings that calibration
reads, the first one if none is named. CPU seconds are of one thread, on several processors beside
other programs: ours : theirs.

"""


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

    def recipe(self, name: str) -> Row | None:
        """Return the row of a recipe, None if it was not measured."""
        scheme, algorithms = RECIPES[name]
        return self._row(self._scheme(scheme), list(algorithms))

    def rounding(self, name: str) -> Row | None:
        """Return the row of the scheme of a recipe without algorithms."""
        return self._row(self._scheme(RECIPES[name][0]), [])

    def inputs(self, name: str) -> Row | None:
        """Return the row that rounds inputs alone, after what a recipe has before rounding."""
        scheme, algorithms = RECIPES[name]
        wanted = f"{self._scheme(scheme)}:inputs"
        before = [options for options in algorithms if options["name"] not in ROUNDING]
        return self._row(wanted, before) or self._row(wanted, [])

    def rival(self, name: str) -> Row | None:
        """Return the best row of other software in the scheme of a recipe."""
        scheme = self._scheme(RECIPES[name][0])
        names = (scheme, scheme.replace("_signed", ""))
        rows = [row for row in self._first() if row["scheme"] in names and "software" in row]
        return min(rows, key=mean_log, default=None)

    def _scheme(self, scheme: str) -> str:
        return IN_64.get(scheme, scheme) if self.name == REAL else scheme

    def _first(self) -> list[Row]:
        return [row for row in self.rows if not row.keys() & {"part", "sampled"}]

    def _row(self, scheme: str, algorithms: list[Any]) -> Row | None:
        wanted = (scheme, algorithms, None)
        keys = ("scheme", "algorithms", "software")
        found = (row for row in self._first() if tuple(map(row.get, keys)) == wanted)
        return next(found, None)


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


def recipe_table(model: Model, less: Callable[[Row, Row, str], str], *, inputs: bool) -> str:
    """Return the table of recipes of a model, beside the best of other software, without a heading.

    Args:
        model: The model.
        less: Writes by how much a row is below another one on a text.
        inputs: Whether there is a column of inputs alone.
    """
    alone = {"rounding alone": model.rounding} | ({"inputs alone": model.inputs} if inputs else {})
    columns = ["recipe", "KL", *alone, "best of others", "its KL", "lower by", "CPU s"]
    lines = []
    for name in RECIPES:
        if (row := model.recipe(name)) is None:
            continue
        cells = [
            f"`{name}`",
            *(listed(r, model.texts) for r in [row, *(f(name) for f in alone.values())]),
        ]
        if (rival := model.rival(name)) is None:
            cells += ["–", "–", "–", short(row["seconds"])]
        else:
            cells += [label(rival), listed(rival, model.texts)]
            cells += [", ".join(less(row, rival, text) for text in model.texts)]
            cells += [f"{short(row['seconds'])} : {short(rival['seconds'])}"]
        lines.append(cells)
    return markdown("", columns, lines).partition("\n\n")[2]


def readme_table(model: Model) -> str:
    """Return the table of README."""
    return recipe_table(model, lambda *rows: f"{100 * below(*rows)[0]:.0f} %", inputs=False)


def page(models: Sequence[Model]) -> str:
    """Return the page of all rows."""
    return HEAD + "\n".join(map(section, models))


def section(model: Model) -> str:
    """Return the part of the page that has the rows of a model."""

    def less(*rows: Any) -> str:
        part, error = below(*rows)
        return f"{100 * part:.0f} ± {100 * error:.0f} %"

    texts = model.texts
    rows = sorted(model.rows, key=lambda row: (row["scheme"], mean_log(row)))
    columns = ["scheme", "way", *texts, "CPU s"]
    lines = []
    for row in rows:
        cells = [
            f"{with_error(kl_of(row, t))} ({row['texts'][t]['perplexity']:.4g})" for t in texts
        ]
        lines.append([row["scheme"], made_by(row), *cells, short(row["seconds"])])
    base = ", ".join(f"{model.base[text]:.4g} ({text})" for text in texts)
    windows = len(kl_of(rows[0], texts[0]))
    return "\n".join(
        [
            f"## {NAMES[model.name][0].upper()}{NAMES[model.name][1:]}",
            "",
            f"{windows} windows of each text. Perplexity in float: {base}. KL in this order:",
            "",
            recipe_table(model, less, inputs=True),
            markdown("All rows, the best of a scheme first", columns, lines),
        ]
    )


def contents() -> dict[Path, str]:
    """Return what the files should contain.

    Raises:
        ValueError: README has no place for its table.
    """
    models = {name: Model(name, found) for name, found in kept().items()}
    before, begin, rest = README.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README} has no {BEGIN.strip()} … {END} for the table of recipes")
    table = readme_table(models[REAL])
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
