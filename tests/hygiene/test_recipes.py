"""Every recipe is the best row of its scheme in the table that a benchmark keeps."""

import json
import math
from statistics import mean, variance

import pytest

from quark.torch.quantization.config.recipes import RECIPES

ERRORS = 3.0  # standard errors that a difference must have to count
SEARCHED = sorted(name for name, (_, algorithms) in RECIPES.items() if algorithms)


@pytest.fixture(scope="module")
def models(root):
    """What ``benchmarks/three_texts.py`` kept of each model: its rows, and its floats."""
    return json.loads((root / "benchmarks" / "three_texts.json").read_text("utf-8"))


def rows_of(model, scheme):
    """Algorithms as text -> the KL of each window by text, of the rows of a scheme.

    Texts on which the float model is worse than a uniform guess say nothing of a loss.
    """
    read = [text for text, found in model["float"].items() if found < model["vocabulary"]]
    return {
        json.dumps(row["algorithms"]): {text: row["texts"][text]["kl"] for text in read}
        for row in model["rows"]
        if row["scheme"] == scheme
    }


def advantage(tables, chosen, other):
    """How many standard errors the mean log KL of a row is below that of the chosen one.

    Paired over windows. Every text of every model that has both rows counts the same.
    Rows with the same values: 0.
    """
    logs = [
        [math.log(mine / theirs) for mine, theirs in zip(table[chosen][t], kl, strict=True)]
        for table in tables
        if {chosen, other} <= table.keys()
        for t, kl in table[other].items()
    ]
    error = math.sqrt(sum(variance(values) / len(values) for values in logs))
    return sum(map(mean, logs)) / error if error else 0.0


def better_rows(models, scheme, algorithms):
    """The rows of a scheme that are measurably better than that of some algorithms."""
    tables, chosen = [rows_of(model, scheme) for model in models.values()], json.dumps(algorithms)
    others = sorted({other for table in tables for other in table} - {chosen})
    return [other for other in others if advantage(tables, chosen, other) >= ERRORS]


@pytest.mark.parametrize("name", SEARCHED)
def test_no_row_is_better_than_the_recipe(name, models):
    scheme, algorithms = RECIPES[name]
    rows = rows_of(models["shipped"], scheme)
    assert json.dumps(algorithms) in rows, "benchmarks/three_texts.py has not measured the recipe"
    assert len(rows) > 2, "a choice needs alternatives"
    assert not better_rows(models, scheme, algorithms)


@pytest.mark.parametrize("name", SEARCHED)
def test_the_check_refuses_a_worse_row(name, models):
    scheme, algorithms = RECIPES[name]
    rows = rows_of(models["shipped"], scheme)
    worst = max(rows, key=lambda row: sum(map(mean, rows[row].values())))
    assert json.dumps(algorithms) in better_rows(models, scheme, json.loads(worst))
