"""The flags that every verb has: --quiet, --verbose, --log_file; and --json."""

import errno
import json
import logging
import re

import pytest

from quark.cli.main import app
from quark.torch import progress

VERBS = [command.name for command in app.registered_commands]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_them(verb, quark, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = quark(verb, "--help").stdout
    for flag in ("--verbose", "--quiet", "--log_file", "--json"):
        assert len(re.findall(rf"{flag}\b", shown)) >= 1, flag


def test_quiet_prints_nothing(quark, quantize, model_dir, text):
    path, _ = quantize("--quant_scheme", "int8_wo")
    call = ["evaluate", path, "--dataset", text, "--limit", 2, "--seq_len", 16]
    loud, quiet = quark(*call), quark(*call, "--quiet")
    assert "perplexity of" in loud.stderr
    assert "perplexity" in loud.stdout
    assert (quiet.stdout, quiet.stderr, quiet.exit_code) == ("", "", 0)
    assert "models" in json.loads(quark(*call, "-q", "--json").stdout)
    assert quark("schemes").stdout  # the next call is not quiet any more


def test_quiet_prints_warnings_and_errors(quark, refused, monkeypatch, model_dir, tmp_path):
    assert "there is no directory" in refused("evaluate", tmp_path / "gone", "--quiet")


def test_the_log_file(quark, quantize, text, tmp_path):
    path, _ = quantize("--quant_scheme", "int8_wo")
    log = tmp_path / "run.log"
    log.write_text("kept\n")
    call = ["evaluate", path, "--dataset", text, "--limit", 2, "--seq_len", 16, "--quiet"]
    assert quark(*call, "--log_file", log).exit_code == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "kept"
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO    quark ", lines[1])
    assert re.search(r"INFO +perplexity of out-0: \d+\.\d s$", "\n".join(lines), re.MULTILINE)
    assert quark("evaluate", tmp_path / "gone", "--log_file", log).exit_code == 2
    assert "ERROR" in log.read_text().splitlines()[-1]
    assert logging.getLogger("quark").handlers == []


def test_a_log_file_on_a_full_disk(quark, tmp_path, monkeypatch):
    """The work goes on, and the log ends with one warning."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logging.FileHandler, "flush", flush)
    result = quark("schemes", "--log_file", tmp_path / "run.log")
    assert result.exit_code == 0 and result.stdout
    (said,) = result.stderr.splitlines()
    assert said.endswith("run.log ends here, since it cannot be written: No space left on device.")


def test_a_log_file_that_cannot_be_written(refused, tmp_path):
    said = refused("schemes", "--log_file", tmp_path / "gone" / "run.log")
    assert "--log_file" in said
    assert "cannot be written" in said


def test_progress_is_shown_without_a_terminal(quark, monkeypatch, model_dir):
    from quark.cli import models

    def work(*_):
        progress.logger.info("blocks: 1 of 2, 30 s left")
        logging.getLogger("quark.torch.other").info("a detail")
        raise ValueError("stop")

    monkeypatch.setattr(models, "read_config", work)
    assert quark("evaluate", model_dir).stderr == "info: blocks: 1 of 2, 30 s left\nerror: stop\n"
    assert quark("evaluate", model_dir, "-q").stderr == "error: stop\n"


def test_json_of_a_run(quark, model_dir, text, tmp_path):
    path = tmp_path / "int4"
    flags = ["--quant_scheme", "int4_wo_32", "--eval_data", text, "--num_eval_data", 2]
    result = quark("quantize", "--model_dir", model_dir, "--output_dir", path, *flags, "--json")
    found = json.loads(result.stdout)
    assert found["output"] == str(path)
    assert found["layers"] == 14
    assert found["bits_per_weight"] == 4 + 36 / 32
    assert found["bytes"] == (path / "model.safetensors").stat().st_size
    assert found["perplexity"] != found["original_perplexity"] > 1
    assert found["plan"]["memory"] > 0


def test_json_of_convert_collect_merge_and_demo(quark, quantize, model_dir, text, tmp_path):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    out = tmp_path / "ct"
    found = json.loads(quark("convert", path, out, "--to", "compressed-tensors", "--json").stdout)
    assert found["bytes"] == sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert found["verified"] is None
    statistics = tmp_path / "statistics"
    flags = ["--dataset", text, "--seq_len", 16, "--num_calib_data", 2, "--probes", 0]
    call = ["collect", "--model_dir", model_dir, "--output_dir", statistics, *flags]
    found = json.loads(quark(*call, "--json").stdout)
    assert (found["output"], found["layers"]) == (str(statistics), 14)
    merged = quark("merge", statistics, "--output_dir", tmp_path / "merged", "--json")
    assert json.loads(merged.stdout)["layers"] == 14


@pytest.mark.parametrize("target", ["gguf", "compressed-tensors"])
def test_conversions_show_progress(target, quark, quantize, monkeypatch, tmp_path):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    monkeypatch.setattr(progress, "INTERVAL", 0.0)  # a line for each part
    shown = quark("convert", path, tmp_path / "out", "--to", target).stderr
    assert re.search(r"info: writing: \d+ of \d+, \d+ s left\n", shown)
