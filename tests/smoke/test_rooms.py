"""Every module of the package, and every verb of the command line."""

from importlib import import_module
from pathlib import Path

import pytest
import typer

import quark as package
from quark.cli.demo import material
from quark.cli.main import app

pytestmark = pytest.mark.smoke


def test_every_module_is_imported():
    root = Path(package.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if file.name == "__main__.py":
            continue
        parts = file.relative_to(root.parent).with_suffix("").parts
        import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def test_every_verb(quark, model_dir, text, tmp_path, monkeypatch):
    """One after the other, each with what the ones before it wrote."""
    monkeypatch.setattr(material, "WINDOWS", 1)
    data = ("--dataset", text, "--num_calib_data", 2, "--seq_len", 16)
    model, out, statistics = ("--model_dir", model_dir), tmp_path / "out", tmp_path / "statistics"
    calls = {
        "schemes": (),
        "recipes": (),
        "sample": (*model, "--output", tmp_path / "own.jsonl", "--num_samples", 2, "--seq_len", 8),
        "collect": (*model, "--output_dir", statistics, *data, "--probes", 1),
        "merge": (statistics, "--output_dir", tmp_path / "merged"),
        "search": (
            *(*model, "--output", tmp_path / "mixed.json", "--formats", "int4_wo_32,int8_wo"),
            *("--eval_data", text, "--seq_len", 16, "--statistics", statistics, "--target_bits", 6),
        ),
        "quantize": (
            *(*model, "--output_dir", out, "--quant_scheme", "int4_wo_32", "--skip_evaluation"),
            *("--dataset", text),
        ),
        "inspect": (out,),
        "convert": (out, tmp_path / "gptq", "--to", "gptq"),
        "evaluate": (out, "--original", model_dir, "--dataset", text, "--limit", 2),
        "compare": (model_dir, out, "--dataset", text, "--limit", 2, "--new_tokens", 2),
        "report": (out, "--original", model_dir, "--output", tmp_path / "report.html"),
        "conform": ("--quick", "--oracle", "torch"),
        "demo": ("--schemes", "int8_wo"),
    }
    assert set(typer.main.get_command(app).commands) == set(calls)
    for verb, arguments in calls.items():
        result = quark(verb, *arguments)
        assert result.exit_code == 0, f"{verb}: {result.output}"
