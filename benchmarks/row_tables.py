"""Rows of ``three_texts.py`` as text: what made them, what they lose, and tables of them."""

from __future__ import annotations

import math
from statistics import mean

import torch
from kept_rows import Row
from measure import markdown
from preparations import NONE
from scores import standard_error

REFERENCE = "gptq"
ROUNDING = (REFERENCE, "qronos", "yaqa")  # algorithms that round, of which a row has one, the last
NUMBERS = ("alpha", "random_tokens", "output_damp_percent")  # stated with their value in a label


def label(row: Row) -> str:
    """Return the way to a row, such as ``rotation R1 R2, gptq choose damping``."""
    words = []
    for options in row["algorithms"]:
        names = [name for name, value in options.items() if value is True]
        on = [name.upper() if len(name) == 2 else name.replace("_", " ") for name in names]
        steps = [f"{options['iters']} steps"] if "iters" in options else []
        online = options.get("online_config")
        blocks = [f"of {options['rotation_size']} inputs"] if online else []
        factors = ["after factors"] if online and "use_input_prescale" in online else []
        shares = [f"{n.replace('_', ' ')} {options[n]:g}" for n in NUMBERS if n in options]
        words.append(" ".join([options["name"], *on, *shares, *steps, *blocks, *factors]))
    made = ", ".join(words) or NONE
    made += f", {row['sampled']} sampled" if "sampled" in row else ""
    made = f"{row['software']}: {made}" if "software" in row else made
    return f"{made} (part {row['part']})" if "part" in row else made


def with_error(values: torch.Tensor, sign: str = "") -> str:
    """Return a mean and its standard error, such as ``70.8 ± 1.9``."""
    return f"{float(values.mean()):{sign}.1f} ± {standard_error(values):.1f}"


def table(title: str, rows: list[Row]) -> str:
    """Return the table of all rows."""
    texts = list(rows[0]["texts"])
    columns = ["scheme", "algorithm", *(f"{t}: KL" for t in texts)]
    columns += [*(f"{t}: against" for t in texts), *(f"{t}: perplexity" for t in texts), "CPU s"]
    lines = []
    for row in rows:
        kl = {t: torch.tensor(row["texts"][t]["kl"]) for t in texts}
        line = [row["scheme"], label(row), *(with_error(kl[t]) for t in texts)]
        reference = reference_of(row, rows)
        for t in texts:
            difference = kl[t] - torch.tensor(reference["texts"][t]["kl"])
            line.append("" if reference is row else with_error(difference, "+"))
        line += [_perplexity(row, reference, t) for t in texts]
        lines.append([*line, row["seconds"]])
    return markdown(title, columns, lines)


def _perplexity(row: Row, reference: Row, text: str) -> str:
    """Return a perplexity, with the difference of the loss to another row, if both have it."""
    found, other = row["texts"][text], reference["texts"][text]
    written = f"{found['perplexity']:.5g}"
    if reference is row or not ("loss" in found and "loss" in other):
        return written
    difference = torch.tensor(found["loss"]) - torch.tensor(other["loss"])
    return f"{written} ({with_error(difference, '+')})"


def reference_of(row: Row, rows: list[Row]) -> Row:
    """Return the row that a row is paired with, itself if there is none.

    It is that of GPTQ after the same preparation; for other software, our row whose mean logarithm
    of KL is the least.
    """
    ours = [
        other
        for other in rows
        if "software" not in other
        and all(other.get(key) == row.get(key) for key in ("scheme", "part", "sampled"))
    ]
    if "software" in row:
        return min(ours, key=mean_log, default=row)
    names = [options["name"] for options in row["algorithms"]]
    count = len(names) - (names[-1:] != [] and names[-1] in ROUNDING)
    expected = [*row["algorithms"][:count], {"name": REFERENCE}]
    return next((other for other in ours if other["algorithms"] == expected), row)


def mean_log(row: Row) -> float:
    """Return the mean logarithm of KL over windows, the mean over texts."""
    return mean(mean(map(math.log, text["kl"])) for text in row["texts"].values())
