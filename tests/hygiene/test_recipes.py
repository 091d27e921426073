"""Every recipe is the best row of its scheme in the table that a benchmark keeps."""

import json
import math
from collections import defaultdict
from statistics import mean, variance

import pytest

from quark.torch.quantization.config.recipes import RECIPES

ERRORS = 3.0  # standard errors that a difference must have to count
REAL = "real"  # the model that decides, for rows that were measured on it
# Its layers of 576 inputs have no groups of 128. Scheme of a recipe -> scheme of the rows there.
IN_64 = {f"int{bits}_wo_signed_128": f"int{bits}_wo_signed_64" for bits in (4, 3)}
SEARCHED = sorted(name for name, (_, algorithms) in RECIPES.items() if algorithms)


@pytest.fixture(scope="module")
def models(root):
    """What ``benchmarks/three_texts.py`` kept of each model: its rows, and its floats."""
    return json.loads((root / "benchmarks" / "three_texts.json").read_text("utf-8"))


def key_of(row):
    """Who made a row and how, as text."""
    sampled = " and sampled text" if "sampled" in row else ""
    return row.get("software", "") + json.dumps(row["algorithms"]) + sampled


def is_ours(key):
    return key.startswith("[")


def rows_of(model, scheme):
    """Key -> the KL of each window by text, then by part of the calibration data, of a scheme.

    Texts on which the float model is worse than a uniform guess say nothing of a loss.
    """
    read = [text for text, found in model["float"].items() if found < model["vocabulary"]]
    rows = defaultdict(lambda: {text: {} for text in read})
    for row in model["rows"]:
        for text in read if row["scheme"] == scheme else ():
            rows[key_of(row)][text][row.get("part", 0)] = row["texts"][text]["kl"]
    return rows


def advantage(tables, chosen, other):
    """How many standard errors the mean log KL of a row is below that of the chosen one.

    Paired over windows, each the mean over the parts of calibration data that both rows have. Every
    text of every model counts the same. Rows with the same values, or without a table: 0.
    """
    logs = []
    for table in tables:
        for text, parts in table[other].items() if {chosen, other} <= table.keys() else ():
            mine = table[chosen][text]
            pairs = [zip(mine[p], parts[p], strict=True) for p in parts.keys() & mine.keys()]
            ratios = [[math.log(a / b) for a, b in pair] for pair in pairs]
            if ratios:
                logs.append([mean(window) for window in zip(*ratios, strict=True)])
    error = math.sqrt(sum(variance(values) / len(values) for values in logs))
    return sum(map(mean, logs)) / error if error else 0.0


def rotates_inputs(key):
    """Whether a client must rotate inputs to run what a row made. Few clients do."""
    return '"r4": true' in key or '"online_config"' in key


def takes_more(key):
    """Whether a row has more than a recipe: training after all algorithms, or sampled text."""
    return '"distill"' in key or key.endswith(" and sampled text")


def better_rows(models, scheme, chosen):
    """The keys of a scheme that are measurably better than one of them.

    A row that any client runs is compared with such rows alone.

    Rows that were measured on the real model are compared there alone: the other models are small
    and trained in minutes, and YAQA wins there where it loses on the real one. Other rows are
    compared if they were measured on all models of the chosen one.
    """
    tables = {
        name: rows_of(model, IN_64.get(scheme, scheme) if name == REAL else scheme)
        for name, model in models.items()
    }
    of_chosen = {name: table for name, table in tables.items() if chosen in table}
    deciding = of_chosen.get(REAL)
    compared = [deciding] if deciding is not None else list(of_chosen.values())
    others = sorted(set.intersection(*map(set, compared)) - {chosen}) if compared else []
    others = [other for other in others if not takes_more(other)]
    if not rotates_inputs(chosen):
        others = [other for other in others if not rotates_inputs(other)]
    return [other for other in others if advantage(compared, chosen, other) >= ERRORS]


@pytest.mark.parametrize("name", SEARCHED)
def test_no_row_is_better_than_the_recipe(name, models):
    """Neither another row of ours, nor one of other software."""
    scheme, algorithms = RECIPES[name]
    rows, chosen = rows_of(models["shipped"], scheme), json.dumps(algorithms)
    assert chosen in rows, "benchmarks/three_texts.py has not measured the recipe"
    assert len(rows) > 2, "a choice needs alternatives"
    assert not better_rows(models, scheme, chosen)


@pytest.mark.parametrize("name", SEARCHED)
def test_the_check_refuses_a_worse_row(name, models):
    scheme, algorithms = RECIPES[name]
    chosen = json.dumps(algorithms)
    there = rows_of(models[REAL], IN_64.get(scheme, scheme))
    model = REAL if chosen in there and len(there) > 1 else "shipped"
    rows = there if model == REAL else rows_of(models[model], scheme)

    def loss(row):
        texts = rows[row].values()
        return sum(mean(mean(map(math.log, kl)) for kl in parts.values()) for parts in texts)

    same = [row for row in rows if is_ours(row) and rotates_inputs(row) == rotates_inputs(chosen)]
    worst = max(same, key=loss)
    assert chosen in better_rows({model: models[model]}, scheme, worst)


def test_other_software_beats_no_scheme(models):
    """Of every scheme that other software was asked for, one of our rows is not worse.

    Signed scales have the same layout, and auto-round has them under the plain name.
    """
    schemes = {
        row["scheme"] for model in models.values() for row in model["rows"] if "software" in row
    }
    assert schemes, "benchmarks/three_texts.py --peer has measured nothing"
    for scheme in schemes:
        signed = scheme.replace("_wo_", "_wo_signed_")
        tables = [rows_of(model, scheme) | rows_of(model, signed) for model in models.values()]
        keys = {key for table in tables for key in table}
        peers = [key for key in keys if not is_ours(key)]
        assert any(
            all(advantage(tables, ours, peer) < ERRORS for peer in peers)
            for ours in filter(is_ours, keys)
        ), f"other software is better at {scheme}"


def test_a_row_that_any_client_runs_is_compared_with_such_rows():
    keys = ["[]", '[{"name": "rotation", "r1": true}]', '[{"name": "rotation", "r4": true}]']
    assert [rotates_inputs(key) for key in keys] == [False, False, True]
    rows = [
        {"scheme": "s", "algorithms": json.loads(key), "texts": {"t": {"kl": kl}}}
        for key, kl in zip(keys, ([2.0, 8.1, 4.0], [1.5, 6.0, 3.1], [1.0, 4.0, 2.1]), strict=True)
    ]
    model = {"made up": {"float": {"t": 5.0}, "vocabulary": 10, "rows": rows}}
    assert better_rows(model, "s", keys[0]) == [keys[1]]
    assert better_rows(model, "s", keys[1]) == []
    assert better_rows(model, "s", keys[2]) == []


def test_parts_of_the_data_are_paired_with_themselves():
    """A row that is better on each part of the data is better, however the parts differ."""
    made = {"chosen": [[2.0, 8.0, 4.0], [20.0, 81.0, 40.0]], "other": [[1, 4, 2], [10, 40, 20]]}
    rows = [
        {"scheme": "s", "algorithms": [name], "part": part, "texts": {"t": {"kl": kl}}}
        for name, parts in made.items()
        for part, kl in enumerate(parts)
    ]
    model = {"float": {"t": 5.0}, "vocabulary": 10, "rows": rows}
    assert better_rows({"made up": model}, "s", '["chosen"]') == ['["other"]']
    assert better_rows({"made up": model}, "s", '["other"]') == []


def made_up(**rows):
    """A model with a text that it can read, and the KL of its windows by name of the row."""
    made = [
        {"scheme": "s", "algorithms": [name], "texts": {"t": {"kl": kl}}}
        for name, kl in rows.items()
    ]
    return {"float": {"t": 5.0}, "vocabulary": 10, "rows": made}


def test_a_row_of_fewer_models_is_not_compared():
    one = made_up(chosen=[2.0, 8.1, 4.0], other=[1, 4, 2])
    two = made_up(chosen=[2.0, 8.0, 4.1], other=[1, 4, 2])
    assert better_rows({"one": one, "two": two}, "s", '["chosen"]') == ['["other"]']
    alone = made_up(chosen=[2.0, 8.0, 4.1])
    assert better_rows({"one": one, "two": alone}, "s", '["chosen"]') == []
    assert better_rows({"one": one, "two": alone}, "s", '["other"]') == []


def test_the_real_model_decides():
    small = made_up(chosen=[2.0, 8.1, 4.0], other=[0.1, 0.4, 0.2])
    real = made_up(chosen=[1.0, 4.0, 2.0], other=[2.0, 8.1, 4.0])
    models = {"small": small, REAL: real}
    assert better_rows(models, "s", '["chosen"]') == []
    assert better_rows(models, "s", '["other"]') == ['["chosen"]']
    assert better_rows({"small": small}, "s", '["chosen"]') == ['["other"]']


def test_a_text_that_the_model_cannot_read_does_not_count():
    rows = [
        {"scheme": "s", "algorithms": [name], "texts": {"t": {"kl": kl}}}
        for name, kl in (("chosen", [2.0, 8.0, 5.0]), ("other", [1.0, 4.0, 2.0]))
    ]
    model = {"float": {"t": 50.0}, "vocabulary": 10, "rows": rows}
    assert better_rows({"made up": model}, "s", '["chosen"]') == []
