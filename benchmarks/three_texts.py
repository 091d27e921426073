"""Accuracy on text that calibration never saw: like calibration, code, and other scripts.

    python benchmarks/three_texts.py
    python benchmarks/three_texts.py --rows mxfp4 --before awq,r1r2r4 --algorithms gptq,yaqa
    python benchmarks/three_texts.py --model real      # SmolLM2-135M-Instruct: real_model.py
    python benchmarks/three_texts.py --model twin      # the shipped model with outliers
    python benchmarks/three_texts.py --model second    # a GPT-2: second.py
    python benchmarks/three_texts.py --model experts   # a mixture of experts: experts.py
    python benchmarks/three_texts.py --model DIRECTORY
    python benchmarks/three_texts.py --part 1          # calibrated on other docstrings
    python benchmarks/three_texts.py --model real --rows mxfp4 --algorithms "" --peer auto-round
    python benchmarks/three_texts.py --peer auto-round --asked "autoround, 200 steps"
    python benchmarks/three_texts.py --rows nvfp4:inputs --algorithms none  # weights in float
    python benchmarks/three_texts.py --rows nvfp4:four_over_six --algorithms gptq
    python benchmarks/three_texts.py --algorithms gptq:choose_damping:random_tokens=0.25
    python benchmarks/three_texts.py --rows mxfp4 --before smoothed:random_tokens=0.5
    python benchmarks/three_texts.py --rows w_int2_per_group_asym --algorithms yaqa --finish 40
    python benchmarks/three_texts.py --sampled 8       # and text that the model writes itself
    python benchmarks/three_texts.py --kept            # the tables of three_texts.json
    python benchmarks/three_texts_page.py              # three_texts.md, and the table of README

Every row is calibrated on English docstrings and evaluated on the texts of ``texts.py``. *KL* is in
millinats, with its standard error over windows. *Against* is the difference to the row of GPTQ
after the same preparation, paired over windows: the windows of a text differ much more than two
rows do. Likewise in brackets after perplexity: the difference of the loss (the logarithm of the
perplexity) in millinats. A row of other software (``rivals.py``) is paired with our best one. Rows
of models that have a name are kept in ``three_texts.json``, in place of the same row. The choice of
recipes is checked against that file.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import experts
import peers
import rivals
import second
import torch
from algorithms import plant_outliers
from kept_rows import Row, check_kept, keep, kept
from measure import Meter, in_fresh_process, machine, say
from preparations import NONE, PREPARATIONS, options_of, preparation
from real_model import FOLDER, fetch_model
from row_tables import REFERENCE, label, table
from scores import judge_text, perplexity, predict
from texts import evaluation_texts

from quark.demo.text import model_directory, training_documents
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.distillation import DistillationOptions, distill, split_kept_back
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.evaluation.sampling import sample_sequences
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.group_fit import fit_group_sizes, fit_super_blocks

LENGTH = 256  # tokens of a window
PARTS = 7  # of the documents for calibration, of which one is taken
# Model with a name -> windows for calibration, and for each text.
MODELS = dict.fromkeys(("shipped", "twin", "second", "experts"), (32, 16)) | {"real": (12, 8)}
FINISH = "distill"  # steps of one sequence, after all algorithms
INPUTS = ":inputs"  # after a scheme: inputs alone are rounded
CHOICE = ":four_over_six"  # after a scheme: this option of its inputs is on
# Scheme -> its preparations.
SCHEMES = {
    "int4_wo_128": (NONE, "awq"),
    "int3_wo_128": (NONE, "awq"),
    "w_int2_per_group_asym": (NONE,),
    "w_int8_per_channel_a_int8_per_tensor_sym": (NONE, "smooth"),
    "int4_wa_128": (NONE, "awq", "r1r2r4"),
    "mxfp4": (NONE, "awq", "r1r2r4"),
    "nvfp4": (NONE, "awq", "r1r2"),
}
CHOSEN = ":choose_damping"  # after a name: this option is on
ALGORITHMS = (NONE, REFERENCE, "qronos", "yaqa", f"{REFERENCE}{CHOSEN}", f"yaqa{CHOSEN}")
# What of other software is measured, where it has the scheme.
ASKED = {
    "auto-round": ("autoround, 50 steps",),
    "llm-compressor": ("", "gptq", "smooth, alpha 0.8", "smooth, gptq"),
    "gptqmodel": ("gptq",),
    "modelopt": tuple(rivals.MODELOPT),
    "amd-quark": ("gptq",),
    "llama.cpp": ("", "importance"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shipped", help=f"{', '.join(MODELS)}, or a directory")
    parser.add_argument("--rows", default=",".join(SCHEMES), help="schemes, with commas between")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="those that round")
    parser.add_argument(
        "--before", help=f"of {', '.join(PREPARATIONS)}; those of the scheme if left out"
    )
    parser.add_argument(
        "--part",
        type=int,
        default=0,
        choices=range(PARTS),
        help="of the docstrings to calibrate on",
    )
    parser.add_argument(
        "--peer", action="append", default=[], choices=ASKED, help="also measure it; repeatable"
    )
    parser.add_argument(
        "--asked", help="what to ask them for, of rivals.py, with semicolons between"
    )
    parser.add_argument(
        "--finish", type=int, default=0, help="steps of the distillation finish after algorithms"
    )
    parser.add_argument(
        "--sampled",
        type=int,
        default=0,
        help="sequences that the model writes itself, beside the docstrings; none for --peer",
    )
    parser.add_argument("--anew", action="store_true", help="drop kept rows of other weights")
    parser.add_argument("--kept", action="store_true", help="measure nothing; print kept rows")
    return parser.parse_args()


def model_at(name: str) -> Path:
    """Return the directory of a model in float."""
    if name in ("shipped", "twin"):
        return model_directory()
    made = {"real": float_checkpoint, "second": second.directory, "experts": experts.directory}
    return made[name]() if name in made else Path(name)


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

    def __init__(self, name: str, part: int, sampled: int = 0) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place, self.part, self.sampled = model_at(name), part, sampled
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(place)
        self.model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        calibration, evaluation = MODELS.get(name, MODELS["shipped"])
        documents = training_documents(2_000_000)[part::PARTS]  # of all parts of the library
        self.windows = windows = token_windows(documents, tokenizer, LENGTH, calibration)
        self.data = list(windows.split(4))
        if name == "twin":
            plant_outliers(self.model, windows)
        if sampled:
            own = torch.cat([*sample_sequences(self.model, sampled, LENGTH)])
            self.data += own.split(4)
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
        template = LLMTemplate.get(self.model.config.model_type)
        config = template.get_config(scheme=scheme.split(":")[0])
        layer = config.global_quant_config
        if INPUTS in scheme:
            layer = replace(layer, weight=None)
        if CHOICE in scheme:
            layer = replace(layer, input_tensors=layer.input_tensors.changed(four_over_six=True))
        config.global_quant_config = layer
        config, _ = fit_super_blocks(self.model, fit_group_sizes(self.model, config)[0])
        finishes = [options for options in algorithms if options["name"] == FINISH]
        options = [algo_config_from_dict(one) for one in algorithms if one not in finishes]
        config, model = replace(config, algo_config=options or None), copy.deepcopy(self.model)
        with Meter() as meter:
            if finishes:
                model = self._finished(config, model, finishes[0]["iters"])
            else:
                model = ModelQuantizer(config).quantize_model(model, self.data)
                ModelQuantizer.freeze(model)
        texts = {
            name: judge_text(self.expected[name], model, windows)
            for name, windows in self.texts.items()
        }
        row = {"scheme": scheme, "algorithms": algorithms, "seconds": meter.cpu, "texts": texts}
        return row | self._where() | ({"sampled": self.sampled} if self.sampled else {})

    def _finished(self, config: Any, model: Any, steps: int) -> Any:
        """Return a model that is quantized with a part of the data, and then trained."""
        finish = DistillationOptions(steps=steps, batch_size=1)
        seen, _ = split_kept_back(self.data, finish)
        data = list(torch.cat(seen).split(4))
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))
        distill(model, self.model, self.data, finish)
        return model

    def row_of_peer(self, peer: str, scheme: str, asked: str) -> Row:
        """Return such a row of other software, which runs in an environment of its own.

        Raises:
            RuntimeError: It failed.
        """
        python, algorithms = peers.environment(peer), rivals.PEERS[peer][1][scheme][asked]
        with tempfile.TemporaryDirectory() as folder:
            windows = {"calibration": self.windows, **self.texts}
            rivals.share(Path(folder), self.model, self.tokenizer, **windows)
            found = in_fresh_process("rivals.py", peer, scheme, asked, folder, python=python)
        row = {"scheme": scheme, "algorithms": algorithms, "software": peer}
        row |= {"seconds": found["seconds"], "texts": found["texts"]}
        return row | self._where()

    def _where(self) -> Row:
        """Return the machine, and the part of the documents unless it is the first."""
        return {"machine": machine()} | ({"part": self.part} if self.part else {})


def show(name: str, model: dict[str, Any], rows: list[Row]) -> None:
    """Print the table of some rows of a model."""
    print(*sorted({row["machine"] for row in rows}), sep="; ", end="\n\n")
    print("Perplexity in float:", ", ".join(f"{t} {p:.5g}" for t, p in model["float"].items()))
    print(end="\n")
    print(table(f"{name}, calibrated on docstrings", rows))


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    schemes = options.rows.split(",")
    given = options.before.split(",") if options.before else ()
    if options.kept:
        for name, model in kept().items():
            if chosen := [row for row in model["rows"] if row["scheme"] in schemes]:
                show(name, model, chosen)
        return
    finish = [{"name": FINISH, "iters": options.finish}] if options.finish else []
    bench, rows = Bench(options.model, options.part, options.sampled), []
    if options.model in MODELS:
        check_kept(options.model, bench.base, options.anew)

    def add(row: Row) -> None:
        rows.append(row)
        if options.model in MODELS:
            keep(options.model, bench.model.config.vocab_size, bench.base, row)

    for scheme in schemes:
        own = SCHEMES.get(scheme.split(":")[0], (NONE,))
        for before in map(preparation, given or own):
            for name in filter(None, options.algorithms.split(",")):
                algorithms = [*before, *([] if name == NONE else [options_of(name)]), *finish]
                say(f"{scheme} {label({'algorithms': algorithms})}")
                add(bench.row(scheme, algorithms))
        for peer in options.peer:
            wanted = options.asked.split(";") if options.asked else ASKED[peer]
            for asked in set(wanted) & set(rivals.PEERS[peer][1].get(scheme, {})):
                say(f"{scheme} {peer} {asked}")
                add(bench.row_of_peer(peer, scheme, asked))
    show(options.model, {"float": bench.base}, rows)


if __name__ == "__main__":
    main()
