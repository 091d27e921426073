"""Accuracy on text that calibration never saw: like calibration, code, and other scripts.

    python benchmarks/three_texts.py
    python benchmarks/three_texts.py --rows mxfp4 --algorithms none,gptq,yaqa --json
    python benchmarks/three_texts.py --model real      # SmolLM2-135M-Instruct: real_model.py
    python benchmarks/three_texts.py --model DIRECTORY

Every row is calibrated on English docstrings and evaluated on the texts of ``texts.py``. *KL* is in
millinats, with its standard error over windows. *Against* is the difference to the row of GPTQ in
the same scheme, paired over windows: the windows of a text differ much more than two rows do.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Meter, machine, markdown, say
from real_model import FOLDER, fetch_model
from scores import divergences, standard_error
from texts import evaluation_texts

from quark.demo.text import model_directory, training_documents
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict

LENGTH = 256  # tokens of a window
CALIBRATION_WINDOWS = 32
EVALUATION_WINDOWS = 16
ROTATIONS = {"name": "rotation", "r2": True, "r4": True}
# Scheme -> algorithms that come before the one of the row.
SCHEMES: dict[str, list[dict[str, Any]]] = {
    "int4_wo_64": [],
    "mxfp4": [ROTATIONS],
    "nvfp4": [{"name": "rotation", "r2": True}],
    "w_int8_per_channel_a_int8_per_tensor_sym": [{"name": "smooth", "alpha": 1}],
}
NONE, REFERENCE = "none", "gptq"
ALGORITHMS = (NONE, REFERENCE, "gptaq", "qronos", "yaqa")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shipped", help="shipped, real, or a directory")
    parser.add_argument("--rows", default=",".join(SCHEMES), help="schemes, with commas between")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="likewise")
    parser.add_argument("--windows", type=int, default=EVALUATION_WINDOWS, help="for each text")
    parser.add_argument("--calibration", type=int, default=CALIBRATION_WINDOWS, help="windows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def model_at(name: str) -> Path:
    """Return the directory of a model in float."""
    if name == "shipped":
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
    """A float model, its calibration data, and the windows of each text."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = model_at(options.model)
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
        self.model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        documents = training_documents(2_000_000)[::7]  # of all parts of the library
        windows = token_windows(documents, tokenizer, LENGTH, options.calibration)
        self.data = list(windows.split(4))
        self.texts = {
            name: token_windows(text, tokenizer, LENGTH, options.windows)
            for name, text in evaluation_texts().items()
        }
        self.base = {name: perplexity(self.model, w) for name, w in self.texts.items()}

    def row(self, scheme: str, algorithm: str) -> dict[str, Any]:
        """Return perplexity, and KL in millinats of each window, by text."""
        names = [] if algorithm == NONE else [{"name": algorithm}]
        config = LLMTemplate.get(self.model.config.model_type).get_config(scheme=scheme)
        algorithms = [algo_config_from_dict(given) for given in (*SCHEMES.get(scheme, []), *names)]
        config, model = replace(config, algo_config=algorithms or None), copy.deepcopy(self.model)
        with Meter() as meter:
            model = ModelQuantizer(config).quantize_model(model, self.data)
            ModelQuantizer.freeze(model)
        texts = {
            name: {
                "perplexity": perplexity(model, windows),
                "kl": (1000 * divergences(self.model, model, windows)).tolist(),
            }
            for name, windows in self.texts.items()
        }
        return {"scheme": scheme, "algorithm": algorithm, "seconds": meter.cpu, "texts": texts}


def with_error(values: torch.Tensor, sign: str = "") -> str:
    """Return a mean and its standard error, such as ``70.8 ± 1.9``."""
    return f"{float(values.mean()):{sign}.1f} ± {standard_error(values):.1f}"


def table(rows: list[dict[str, Any]], texts: list[str]) -> str:
    """Return the table of all rows."""
    columns = ["scheme", "algorithm", *(f"{t}: KL" for t in texts)]
    columns += [*(f"{t}: against" for t in texts), *(f"{t}: perplexity" for t in texts), "CPU s"]
    lines = []
    references = {row["scheme"]: row for row in rows if row["algorithm"] == REFERENCE}
    for row in rows:
        kl = {t: torch.tensor(row["texts"][t]["kl"]) for t in texts}
        line = [row["scheme"], row["algorithm"], *(with_error(kl[t]) for t in texts)]
        reference = references.get(row["scheme"], row)
        for t in texts:
            difference = kl[t] - torch.tensor(reference["texts"][t]["kl"])
            line.append("" if reference is row else with_error(difference, "+"))
        line += [f"{row['texts'][t]['perplexity']:.2f}" for t in texts]
        lines.append([*line, row["seconds"]])
    return markdown("Calibrated on docstrings", columns, lines)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    bench = Bench(options)
    rows = []
    for scheme in options.rows.split(","):
        for algorithm in options.algorithms.split(","):
            say(f"{scheme} {algorithm}")
            rows.append(bench.row(scheme, algorithm))
    if options.json:
        print(json.dumps({"machine": machine(), "float": bench.base, "rows": rows}, indent=2))
        return
    print(machine(), end="\n\n")
    print("Perplexity in float:", ", ".join(f"{n} {p:.2f}" for n, p in bench.base.items()) + "\n")
    print(table(rows, list(bench.texts)))


if __name__ == "__main__":
    main()
