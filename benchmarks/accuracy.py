"""Accuracy of every scheme: perplexity and KL divergence on the same windows.

    python benchmarks/accuracy.py                     # the model that comes with the package
    python benchmarks/accuracy.py --schemes fp8,int4_wo_128 --json
    python benchmarks/accuracy.py --model MODEL --text FILE

Names of one and the same configuration share a row. See README.md for the columns.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from measure import Meter, machine, markdown, say
from scores import divergence

from quark.demo.text import evaluation_documents, model_directory, training_documents
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.evaluation.documents import load_documents
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import summarize
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config import presets
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.kv_cache import with_kv_cache

FLOAT = "float"
LENGTH = 512
CALIBRATION_WINDOWS = 8
EVALUATION_WINDOWS = 16  # the first 8 are those of "quark demo"
COLUMNS = {
    "scheme": "scheme",
    "bits": "bits/weight",
    "perplexity": "perplexity",
    "change": "change, %",
    "kl": "KL, millinats",
    "seconds": "s",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory of another model")
    parser.add_argument("--text", help="file or dataset to evaluate on, instead of docstrings")
    parser.add_argument(
        "--windows",
        type=int,
        default=EVALUATION_WINDOWS,
        help="number of evaluation windows (default 16)",
    )
    parser.add_argument("--schemes", help="schemes, separated by commas (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def configurations(model_type: str, wanted: list[str] | None) -> dict[str, Config]:
    """Return every distinct configuration under the names of its schemes."""
    template = LLMTemplate.get(model_type)
    by_name = {name: template.get_config(scheme=name) for name in presets.scheme_names()}
    if wanted is None:
        for name in presets.KV_CACHE_SCHEMES:
            head = template.exclude_layers_name
            alone = Config(exclude=list(head))
            by_name[f"KV cache {name}"] = with_kv_cache(alone, template.kv_layers_name, name)
    else:
        by_name = {name: template.get_config(scheme=name) for name in wanted}
    rows: list[tuple[list[str], Config]] = []
    for name, config in by_name.items():
        same = next((names for names, known in rows if known == config), None)
        if same is None:
            rows.append(([name], config))
        else:
            same.append(name)
    return {", ".join(names): config for names, config in rows}


class Material:
    """The model and the windows of text for every scheme."""

    def __init__(self, model: Path | None, text: str | None, windows: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = model or model_directory()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        length = min(LENGTH, getattr(self.model.config, "max_position_embeddings", LENGTH))
        documents = load_documents(text) if text else evaluation_documents()
        self.evaluation = token_windows(documents, self.tokenizer, length, windows)
        calibration = training_documents(400_000)
        data = token_windows(calibration, self.tokenizer, length, CALIBRATION_WINDOWS)
        self.calibration = list(data.split(1))


def measure(name: str, config: Config, material: Material, original: Any) -> dict[str, Any]:
    """Quantize a copy of the model and compare it with the original, which is in float32."""
    model = copy.deepcopy(material.model)
    with Meter() as meter:
        model = ModelQuantizer(config).quantize_model(model, material.calibration)
        ModelQuantizer.freeze(model)
    stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(stored, config, type_name(material.model.dtype))
    model = model.float()  # the values of the weights stay
    return {
        "scheme": name,
        "bits": summary.bits_per_weight,
        "perplexity": perplexity(model, material.evaluation),
        "kl": 1000 * divergence(original, model, material.evaluation),
        "seconds": meter.cpu,
    }


def main() -> None:
    options = arguments()
    logging.basicConfig()  # warnings only
    torch.set_num_threads(options.threads)
    wanted = options.schemes.split(",") if options.schemes else None
    material = Material(options.model, options.text, options.windows)
    original = copy.deepcopy(material.model).float()
    base = perplexity(original, material.evaluation)
    bits = summarize(material.model.state_dict()).bits_per_parameter
    rows = [{"scheme": FLOAT, "bits": bits, "perplexity": base, "kl": None, "seconds": None}]
    for name, config in configurations(material.model.config.model_type, wanted).items():
        say(name)
        rows.append(measure(name, config, material, original))
    for row in rows:
        row["change"] = 100 * (row["perplexity"] / base - 1)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    windows, length = material.evaluation.shape
    title = f"Perplexity on {windows} windows of {length} tokens"
    print(machine(), end="\n\n")
    print(markdown(title, [*COLUMNS.values()], [[row[c] for c in COLUMNS] for row in rows]))


if __name__ == "__main__":
    main()
