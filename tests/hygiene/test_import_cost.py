"""Importing does nothing: it is quick, and loads no library that only some calls need.

Each run is a process of its own that imports torch first and then counts the CPU seconds which
our modules add, so that other work on the machine hardly shows.
"""

import json
import os
import statistics
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

LIMIT = 0.3  # CPU seconds above torch
RUNS = 3
MODULES = ["quark.torch", "quark.torch.quantization.config.config"]
NEVER = ["transformers", "onnx", "datasets"]
TERMINAL = ["typer", "rich"]

SCRIPT = """
import json, sys, time
__import__(sys.argv[1])
before, start, report = set(sys.modules), time.process_time(), {}
for name in sys.argv[2:]:
    __import__(name)
    seconds = time.process_time() - start
    report[name] = {"seconds": seconds, "loaded": sorted(set(sys.modules) - before)}
print(json.dumps(report))
"""


def run(modules, after="torch", path=None):
    """Import modules one after another in a fresh process.

    Returns what each one and those before it added: CPU seconds, and names of loaded modules.
    """
    environment = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, after, *modules],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def problems(reports, forbidden, limit=LIMIT):
    """What several runs of one import say against it."""
    seconds = statistics.median(report["seconds"] for report in reports)
    if seconds > limit:
        yield f"importing takes {seconds:.2f} s, more than {limit} s"
    for name in sorted(set(forbidden) & {m for report in reports for m in report["loaded"]}):
        yield f"importing loads {name}"


@pytest.fixture(scope="module")
def runs():
    """One run, or several if it was slow, which other work on the machine may be the reason for."""
    reports = [run(MODULES)]
    is_slow = any(report["seconds"] > LIMIT for report in reports[0].values())
    return reports + [run(MODULES) for _ in range(RUNS - 1) if is_slow]


@pytest.mark.parametrize("module", MODULES)
def test_import_is_cheap(module, runs):
    reports = [report[module] for report in runs]
    assert all(module in report["loaded"] for report in reports)
    assert list(problems(reports, NEVER + TERMINAL)) == []


def test_no_module_loads_an_optional_library(trees):
    """Not even when every module is imported; the terminal's libraries are the command line's."""
    library = sorted(m for m in trees if m.startswith("quark.torch"))
    others = sorted(set(trees) - set(library))
    report = run([*library, *others])
    assert list(problems([report[library[-1]]], NEVER + TERMINAL, limit=float("inf"))) == []
    assert list(problems([report[others[-1]]], NEVER, limit=float("inf"))) == []


# Runs a verb, and prints the names of the loaded modules to the standard error.
VERB = """
import sys
from quark.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""
LIGHT = [
    ["--help"],
    ["--version"],
    ["quantize", "--help"],
    ["schemes"],
    ["schemes", "--json"],
    ["recipes"],
]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_lists_and_help_start_without_torch(arguments):
    """Torch takes two seconds to import, which nobody should wait for to read a list."""
    done = subprocess.run(
        [sys.executable, "-c", VERB, *arguments], capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert done.stdout
    assert loaded & {"torch", "numpy", *NEVER} == set()


def test_inspect_reads_headers_without_torch(tmp_path):
    """Names, shapes and types are read, so nothing that computes is imported."""
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run(
        [sys.executable, "-c", VERB, "inspect", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["parameters"] == 64
    assert set(done.stderr.split()) & {"torch", *NEVER} == set()


@pytest.mark.parametrize(
    ("typed", "completed"), [("insp", "inspect"), ("quantize --quant_s", "--quant_scheme")]
)
def test_a_shell_completes_without_torch(typed, completed):
    script = (
        "import sys\nfrom quark.cli.main import main\n"
        "try:\n    main([])\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    words = f"quark {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **asked, "_QUARK_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed in done.stdout.split()
    assert set(done.stderr.split()) & {"torch", "numpy", *NEVER} == set()


def test_a_costly_import_is_found(tmp_path):
    (tmp_path / "costly.py").write_text(
        "import rich, time\n"
        "start = time.process_time()\n"
        f"while time.process_time() - start < {LIMIT}: pass\n"
    )
    slow, heavy = problems([run(["costly"], "json", tmp_path)["costly"]], NEVER + TERMINAL)
    assert slow.startswith("importing takes 0.")
    assert heavy == "importing loads rich"


def test_the_median_counts():
    def reports(*seconds):
        return [{"seconds": s, "loaded": []} for s in seconds]

    assert list(problems(reports(0.1, 0.2, 9.0), NEVER)) == []
    assert len(list(problems(reports(0.1, 0.4, 0.5), NEVER))) == 1
