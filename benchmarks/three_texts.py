"""Accuracy on text that calibration never saw: like calibration, code, and other scripts.

    python benchmarks/three_texts.py
    python benchmarks/three_texts.py --rows mxfp4 --algorithms gptq,yaqa
    python benchmarks/three_texts.py --model real      # SmolLM2-135M-Instruct: real_model.py
    python benchmarks/three_texts.py --model twin      # the shipped model with outliers
    python benchmarks/three_texts.py --model DIRECTORY
    python benchmarks/three_texts.py --kept            # the tables of three_texts.json

Every row is calibrated on English docstrings and evaluated on the texts of ``texts.py``. *KL* is in
millinats, with its standard error over windows. *Against* is the difference to the row of GPTQ
after the same preparation, paired over windows: the windows of a text differ much more than two
rows do. Rows of models that have a name are kept in ``three_texts.json``, in place of the same row.
The choice of recipes is checked against that file.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from algorithms import plant_outliers
from measure import Meter, machine, markdown, say
from real_model import FOLDER, fetch_model
from scores import standard_error
from texts import evaluation_texts

from quark.demo.text import model_directory, training_documents
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.group_fit import fit_group_sizes

KEPT = Path(__file__).with_suffix(".json")
LENGTH = 256  # tokens of a window
# Model with a name -> windows for calibration, and for each text.
MODELS = {"shipped": (32, 16), "twin": (32, 16), "real": (12, 8)}
AWQ: dict[str, Any] = {"name": "awq"}
SMOOTH: dict[str, Any] = {"name": "smooth", "alpha": 1}
R1R2: dict[str, Any] = {"name": "rotation", "r1": True, "r2": True}
R1R2R4: dict[str, Any] = {**R1R2, "r4": True}
# Scheme -> preparations, one of which comes before the algorithm that rounds.
SCHEMES: dict[str, list[list[dict[str, Any]]]] = {
    "int4_wo_128": [[], [AWQ]],
    "int3_wo_128": [[], [AWQ]],
    "w_int2_per_group_asym": [[]],
    "w_int8_per_channel_a_int8_per_tensor_sym": [[], [SMOOTH]],
    "int4_wa_128": [[R1R2R4]],
    "mxfp4": [[R1R2R4]],
    "nvfp4": [[], [R1R2]],
}
NONE, REFERENCE = "none", "gptq"
CHOSEN = ":choose_damping"  # behind a name: this option is on
ALGORITHMS = (NONE, REFERENCE, "qronos", "yaqa", f"{REFERENCE}{CHOSEN}", f"yaqa{CHOSEN}")

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shipped", help=f"{', '.join(MODELS)}, or a directory")
    parser.add_argument("--rows", default=",".join(SCHEMES), help="schemes, with commas between")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="those that round")
    parser.add_argument("--kept", action="store_true", help="measure nothing; print kept rows")
    return parser.parse_args()


def model_at(name: str) -> Path:
    """Return the directory of a model in float."""
    if name in ("shipped", "twin"):
        return model_directory()
    return float_checkpoint() if name == "real" else Path(name)


def float_checkpoint() -> Path:
    """Return the directory of the real model in float32, which is written on first use."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = FOLDER / "float", fetch_model()
    if not (place / "config.json").is_file():
        given = {"gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
        config = copy.deepcopy(model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # of the GGUF file
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(place)
        plain.save_pretrained(place)
    return place


class Bench:
    """A float model, its calibration data, the windows of each text and its predictions there."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = model_at(name)
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
        self.model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        calibration, evaluation = MODELS.get(name, MODELS["shipped"])
        documents = training_documents(2_000_000)[::7]  # of all parts of the library
        windows = token_windows(documents, tokenizer, LENGTH, calibration)
        self.data = list(windows.split(4))
        if name == "twin":
            plant_outliers(self.model, windows)
        self.texts = {
            text: token_windows(documents, tokenizer, LENGTH, evaluation)
            for text, documents in evaluation_texts().items()
        }
        self.expected = {t: [predict(self.model, w) for w in ws] for t, ws in self.texts.items()}
        self.base = {
            text: perplexity(self.expected[text], windows) for text, windows in self.texts.items()
        }

    def row(self, scheme: str, algorithms: list[dict[str, Any]]) -> Row:
        """Return perplexity, and KL in millinats of each window, by text."""
        config = LLMTemplate.get(self.model.config.model_type).get_config(scheme=scheme)
        config, _ = fit_group_sizes(self.model, config)
        options = [algo_config_from_dict(given) for given in algorithms]
        config, model = replace(config, algo_config=options or None), copy.deepcopy(self.model)
        with Meter() as meter:
            model = ModelQuantizer(config).quantize_model(model, self.data)
            ModelQuantizer.freeze(model)
        texts = {name: self._judge(model, name) for name in self.texts}
        return {"scheme": scheme, "algorithms": algorithms, "seconds": meter.cpu, "texts": texts}

    def _judge(self, model: Any, text: str) -> dict[str, Any]:
        """Return the perplexity of a model on a text, and the KL of each window."""
        expected, windows = self.expected[text], self.texts[text]
        predictions = [predict(model, window) for window in windows]
        lost = [
            1000 * float((before.exp() * (before - after)).sum(-1).double().mean())
            for before, after in zip(expected, predictions, strict=True)
        ]
        kl = [float(f"{value:.4g}") for value in lost]
        return {"perplexity": perplexity(predictions, windows), "kl": kl}


@torch.inference_mode()
def predict(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens but the first, (tokens - 1, vocabulary)."""
    return model(window.unsqueeze(0)).logits[0, :-1].log_softmax(-1)


def perplexity(predictions: list[torch.Tensor], windows: torch.Tensor) -> float:
    """Return the perplexity of the tokens of some windows under log-probabilities."""
    losses = [
        -p.gather(1, window[1:].unsqueeze(1)).double().mean()
        for p, window in zip(predictions, windows, strict=True)
    ]
    return float(f"{torch.stack(losses).mean().exp():.5g}")


def options_of(text: str) -> dict[str, Any]:
    """Return options: of ``gptq``, or of ``gptq:option``, with an option that is on."""
    name, *on = text.split(":")
    return {"name": name, **dict.fromkeys(on, True)}


def label(algorithms: list[dict[str, Any]]) -> str:
    """Return the names of algorithms, such as ``rotation R1 R2, gptq choose damping``."""
    words = []
    for options in algorithms:
        names = [name for name, value in options.items() if value is True]
        on = [name.upper() if len(name) == 2 else name.replace("_", " ") for name in names]
        words.append(" ".join([options["name"], *on]))
    return ", ".join(words) or NONE


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
        line = [row["scheme"], label(row["algorithms"]), *(with_error(kl[t]) for t in texts)]
        reference = next((r for r in rows if is_reference(r, row)), row)
        for t in texts:
            difference = kl[t] - torch.tensor(reference["texts"][t]["kl"])
            line.append("" if reference is row else with_error(difference, "+"))
        line += [f"{row['texts'][t]['perplexity']:.5g}" for t in texts]
        lines.append([*line, row["seconds"]])
    return markdown(title, columns, lines)


def is_reference(row: Row, other: Row) -> bool:
    """Return whether a row is that of GPTQ after the same preparation as another row."""
    names = [options["name"] for options in other["algorithms"]]
    count = len(names) - (names[-1:] != [] and names[-1] in ALGORITHMS)
    expected = [*other["algorithms"][:count], {"name": REFERENCE}]
    return row["scheme"] == other["scheme"] and row["algorithms"] == expected


def kept() -> dict[str, Any]:
    """Return the measurements by name of the model."""
    return json.loads(KEPT.read_text("utf-8")) if KEPT.is_file() else {}


def keep(name: str, bench: Bench, row: Row) -> None:
    """Write a row to the file, in place of the one with the same scheme and algorithms."""
    models = kept()
    models[name] = {
        "machine": machine(),
        "vocabulary": bench.model.config.vocab_size,
        "float": bench.base,
        "rows": [*(r for r in models.get(name, {}).get("rows", ()) if not is_same(r, row)), row],
    }
    KEPT.write_text(json.dumps(models).replace('{"scheme"', '\n{"scheme"') + "\n", "utf-8")


def is_same(row: Row, other: Row) -> bool:
    """Return whether two rows quantize in the same way."""
    return all(row[key] == other[key] for key in ("scheme", "algorithms"))


def show(name: str, model: dict[str, Any], rows: list[Row]) -> None:
    """Print the table of some rows of a model."""
    print(model["machine"], end="\n\n")
    print("Perplexity in float:", ", ".join(f"{t} {p:.5g}" for t, p in model["float"].items()))
    print(end="\n")
    print(table(f"{name}, calibrated on docstrings", rows))


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    schemes = options.rows.split(",")
    if options.kept:
        for name, model in kept().items():
            show(name, model, [row for row in model["rows"] if row["scheme"] in schemes])
        return
    bench, rows = Bench(options.model), []
    for scheme in schemes:
        for before in SCHEMES.get(scheme, [[]]):
            for name in options.algorithms.split(","):
                algorithms = [*before, *([] if name == NONE else [options_of(name)])]
                say(f"{scheme} {label(algorithms)}")
                rows.append(bench.row(scheme, algorithms))
                if options.model in MODELS:
                    keep(options.model, bench, rows[-1])
    show(options.model, {"machine": machine(), "float": bench.base}, rows)


if __name__ == "__main__":
    main()
