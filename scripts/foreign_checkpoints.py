"""Checkpoints of other software, read by this package and by that software.

    python scripts/foreign_checkpoints.py --writer mlx --json docs/checkpoints.json
    python scripts/foreign_checkpoints.py --python llama.cpp=PATH/bin/python

A writer (``foreign_writers.py``) quantizes the shipped model and computes log-probabilities of text
from its files. They are compared with those of the same files, loaded by this package in float32.
The exit status is 1 if a row is not as expected. ``--json FILE`` adds the results to those of
``interop.py``, for the page of ``quark conform``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from foreign_writers import WRITERS
from interop import CALIBRATION, LENGTH, OFFLINE, WINDOWS
from interop_clients import CLIENTS, environment, installed, say, version_of
from interop_rows import CLOSE, EXACT, Expected
from interop_workers import of_model

from quark.demo.text import calibration_documents, evaluation_documents, model_directory
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.export.recognition import load_checkpoint

SCRIPTS = Path(__file__).parent
# llama.cpp rounds inputs to 8 bits, and gptqmodel computes in bfloat16. Others differ by sums
# alone. Where a layer rounds inputs, values beside a tie go either way, except in amd-quark, which
# has the same operations.
EXPECTED: dict[str, Expected] = {
    **dict.fromkeys(("amd-quark", "amd-quark-0.9", "amd-quark-0.10"), EXACT),
    **{"llama.cpp": CLOSE, "gptqmodel": CLOSE},
}
ROUNDED_INPUTS = ("inputs", "A8", "DYNAMIC", "FP8_DEFAULT")  # words of kinds
HEAD = ("writer", "kind", "largest", "median", "perplexity", "result")


def source_of(writer: str, folder: Path) -> Path:
    """Return what a writer quantizes: the shipped model, for llama.cpp as a GGUF file in Q8_0."""
    if writer != "llama.cpp":
        return Path(model_directory())
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer

    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="q8_0"))
    frozen = quantizer.freeze(quantizer.quantize_model(model))
    ModelExporter(folder / "source").export_gguf_model(frozen, model_directory(), "model")
    return folder / "source" / "model.gguf"


def run(
    writer: str,
    python: Path,
    prompts: list[list[int]],
    calibration: list[list[int]],
    folder: Path,
) -> list[dict[str, str]]:
    """Return the rows of a writer."""
    settings = os.environ | OFFLINE | CLIENTS[writer].settings
    source = source_of(writer, folder)
    (folder / "calibration.json").write_text(json.dumps(calibration))
    say(f"{writer} writes")
    script = SCRIPTS.absolute() / "foreign_writers.py"
    command = [str(python.absolute()), str(script), writer, str(source), str(folder)]
    pipe: Any = {"stdout": subprocess.PIPE, "text": True}
    # gptqmodel writes logs to the working directory.
    done = subprocess.run(command, cwd=folder, env=settings, check=True, **pipe)
    written: list[tuple[str, str]] = json.loads(done.stdout)
    tasks, results = folder / "tasks.json", folder / "results.json"
    checkpoints = [(path, False, "") for _, path in written]
    given = {"client": writer, "prompts": prompts, "checkpoints": checkpoints}
    tasks.write_text(json.dumps(given))
    say(f"{writer} computes")
    command = [str(python), str(SCRIPTS / "interop_workers.py"), str(tasks), str(results)]
    subprocess.run(command, env=settings, stdout=sys.stderr, check=True)
    answers = [json.loads(line) for line in results.read_text().splitlines()]
    return [
        judge(writer, kind, Path(path), prompts, answer)
        for (kind, path), answer in zip(written, answers, strict=True)
    ]


def judge(
    writer: str, kind: str, path: Path, prompts: list[list[int]], answer: dict[str, Any]
) -> dict[str, str]:
    """Return the row of a checkpoint: this package against the software that wrote it."""
    row = {"writer": writer, "kind": kind}
    if "error" in answer:
        return row | {"result": "NOT READ by its writer: " + " ".join(answer["error"].split())}
    try:
        model = load_checkpoint(path, dtype="float32")
    except ValueError as error:
        return row | {"result": f"NOT READ here: {error}"}
    ours = torch.tensor(of_model(model, prompts)).double()
    theirs = torch.tensor(answer["found"]).double()
    difference, limits = (ours - theirs).abs(), expected(writer, kind)
    largest, median = difference.max().item(), difference.median().item()
    change = 100 * (torch.exp(theirs.mean() - ours.mean()).item() - 1)
    holds = largest <= limits.largest and abs(change) <= limits.perplexity
    figures = {"largest": f"{largest:.1e}", "median": f"{median:.1e}"}
    figures["perplexity"] = f"{change:+.3f} %"
    return row | figures | {"result": "as expected" if holds else "NOT AS EXPECTED"}


def expected(writer: str, kind: str) -> Expected:
    """Return the bounds for the checkpoints of a writer."""
    rounds = any(word in kind for word in ROUNDED_INPUTS)
    return EXPECTED.get(writer, CLOSE if rounds else EXACT)


def keep(path: Path, rows: list[dict[str, str]], versions: dict[str, str]) -> None:
    """Add rows and versions to the results of ``interop.py``."""
    kept = json.loads(path.read_text())
    named = {(row["writer"], row["kind"]): row for row in [*kept.get("foreign", []), *rows]}
    kept["foreign"] = [named[key] for key in sorted(named)]
    kept["versions"] = dict(sorted((kept["versions"] | versions).items()))
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writer", action="append", default=[], choices=WRITERS)
    parser.add_argument(
        "--python", action="append", default=[], type=installed, metavar="CLIENT=PATH"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results to update")
    options = parser.parse_args()
    pythons = dict(options.python)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    prompts = token_windows(evaluation_documents(), tokenizer, LENGTH)[:WINDOWS].tolist()
    documents = calibration_documents(100_000)
    calibration = token_windows(documents, tokenizer, LENGTH)[:CALIBRATION].tolist()
    rows, versions = [], {}
    print("|", " | ".join(HEAD), "|")
    for writer in options.writer or WRITERS:
        python = pythons.get(writer) or environment(writer)
        versions[writer] = version_of(writer, python)
        with tempfile.TemporaryDirectory() as folder:
            made = run(writer, python, prompts, calibration, Path(folder))
        for row in made:
            print("|", " | ".join(row.get(name, "") for name in HEAD), "|", flush=True)
        rows += made
    if options.json is not None:
        keep(options.json, rows, versions)
    return int(any(row["result"] != "as expected" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
