"""What all verbs share: help, exit codes, errors in one line, quiet libraries."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import typer
from rich.markup import escape

from quark import __version__
from quark.cli import console
from quark.demo.text import model_directory
from quark.torch.export.containers.safetensors import Safetensors
from quark.torch.quantization.config.name_lookup import printable

VERBS = ["demo", "quantize", "evaluate", "inspect", "schemes"]
MAIN = [sys.executable, "-m", "quark.cli.main"]


def test_version_of_a_process():
    done = subprocess.run([*MAIN, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"quark {__version__}\n", "")


def test_help_lists_the_verbs(quark):
    for arguments in ([], ["--help"], ["-h"]):
        result = quark(*arguments)
        assert result.exit_code == 0
        assert [verb for verb in VERBS if f" {verb} " in result.stdout] == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(verb, quark):
    result = quark(verb, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"    quark {verb}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["qantize"], "Did you mean 'quantize'?"),
        (["inspect"], "Missing argument 'DIR'"),
        (["quantize"], "Missing option '--model_dir'"),
        (["quantize", "--bogus"], "No such option"),
        (["inspect", "gone"], "there is no directory gone"),
        (["evaluate", "gone"], "there is no directory gone"),
        (["evaluate", "gone", "--limit", "x"], "--limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_calls(arguments, said, refused):
    message = refused(*arguments)
    assert said in message
    assert "--help)" in message


def test_a_failure_is_one_line(refused, monkeypatch, model_dir):
    monkeypatch.setattr(Safetensors, "contents", fail)
    message = refused("inspect", model_dir, code=1)
    assert message == "error: RuntimeError: first line second line"


def test_verbose_shows_where(quark, monkeypatch, model_dir):
    monkeypatch.setattr(Safetensors, "contents", fail)
    result = quark("inspect", model_dir, "-v")
    assert result.exit_code == 1
    assert 'raise RuntimeError("first line' in result.stderr
    assert result.stderr.endswith("error: RuntimeError: first line second line\n")


def fail(*_):
    raise RuntimeError("first line\nsecond line")


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interruption(error, quark, monkeypatch, model_dir):
    def interrupt(*_):
        raise error

    monkeypatch.setattr(Safetensors, "contents", interrupt)
    result = quark("inspect", model_dir)
    assert result.exit_code == 130
    assert result.stderr == "Interrupted. No incomplete files are left.\n"


def test_own_warnings_are_shown_and_others_are_not(quark, monkeypatch, model_dir):
    def read(*_):
        logging.getLogger("quark.torch.some").warning("a [warning] of ours")
        logging.getLogger("quark.torch.some").info("a detail")
        warnings.warn("a warning of others", stacklevel=1)
        raise ValueError("stop")

    monkeypatch.setattr(Safetensors, "contents", read)
    shown = quark("inspect", model_dir).stderr
    assert shown == "warning: a [warning] of ours\nerror: stop\n"


def test_nothing_of_a_session_stays(quark, monkeypatch, model_dir):
    logger = logging.getLogger("quark")
    before = logger.handlers, logger.level, list(warnings.filters)
    monkeypatch.setattr(Safetensors, "contents", fail)
    quark("inspect", model_dir, "--verbose")
    assert (logger.handlers, logger.level, list(warnings.filters)) == before
    assert "Traceback" not in quark("inspect", model_dir).stderr


def test_inspect_loads_no_transformers(model_dir):
    code = (
        "import sys; from typer.testing import CliRunner; from quark.cli.main import app\n"
        "result = CliRunner().invoke(app, ['inspect', sys.argv[1]])\n"
        "assert result.exit_code == 0, result.output\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model_dir)], check=True)


@pytest.mark.parametrize(
    ("count", "format_bytes", "format_count"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (1000, "1.0 kB", "1.0 k"),
        (99_949, "99.9 kB", "99.9 k"),
        (999_499, "999 kB", "999 k"),
        (999_500, "1.0 MB", "1.0 M"),
        (8_393_216, "8.4 MB", "8.4 M"),
        (7 * 10**15, "7000 TB", "7000 T"),
    ],
)
def test_numbers_for_people(count, format_bytes, format_count):
    assert console.format_bytes(count) == format_bytes
    assert console.format_count(count) == format_count


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_control_c_leaves_nothing(tmp_path):
    """Interrupted in the middle of the calibration of a model that takes seconds to calibrate."""
    output = tmp_path / "models" / "out"
    command = ["quantize", "--model_dir", model_directory(), "--output_dir", output]
    flags = ["--quant_scheme", "int8", "--num_calib_data", 256, "--skip_evaluation"]
    process = subprocess.Popen(
        [str(part) for part in (*MAIN, *command, *flags)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that starts tests in the background lets them ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if "reading data" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == "Interrupted. No incomplete files are left.\n"
    assert list(tmp_path.rglob("*")) == []


def test_schemes_are_listed(quark):
    from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES, scheme_names

    shown = quark("schemes", "--all").stdout
    names = [*scheme_names(), *KV_CACHE_SCHEMES]
    assert [name for name in names if f" {name} " not in shown] == []
    assert "uint4 per group 32 asym" in shown


def test_schemes_for_programs(quark):
    data = json.loads(quark("schemes", "--json").stdout)
    by_name = {row["name"]: row for row in data["quant_scheme"]}
    assert by_name["fp8"]["input"] == "fp8_e4m3 per tensor static"
    assert by_name["fp8"]["needs_data"] is True
    assert by_name["ptpc_fp8"]["needs_data"] is False
    assert data["kv_cache_dtype"][0] == {"name": "fp8", "kv_cache": "fp8_e4m3 per tensor static"}


HOSTILE = "a\x1b[31m\x07\r\x9bb\u202ec"


@pytest.mark.parametrize(
    "show",
    [
        lambda: console.err.print(escape(HOSTILE), soft_wrap=True),
        lambda: console.report(ValueError(HOSTILE)),
        lambda: console.report(console.wrong("--flag", HOSTILE)),
        lambda: logging.getLogger("quark.test").warning("%s", HOSTILE),
        lambda: console.err.print(console.facts({"name": escape(HOSTILE)})),
    ],
    ids=["print", "error", "flag", "log", "table"],
)
def test_names_do_not_control_the_terminal(show):
    with console.session(), console.err.capture() as captured:
        show()
    shown = captured.get()
    assert "a\\x1b[31m" in shown and "b\\u202ec" in shown
    assert all(c == "\n" or c.isprintable() for c in shown)


def test_a_file_with_such_a_name(quark, tmp_path):
    path = tmp_path / "a\x1b[2Jb"
    result = quark("inspect", path)
    assert result.exit_code == 2
    assert "\x1b" not in result.output and "a\\x1b[2Jb" in result.output


def test_lines_and_tabs_stay():
    assert printable("a\n\tb é 字 🙂") == "a\n\tb é 字 🙂"


def test_a_warning_is_shown_once():
    logger = logging.getLogger("quark.some.part")
    with console.session(), console.err.capture() as captured:
        for name in ("one", "other", "one"):
            logger.warning("%s stays in float", name)
    with console.session(), console.err.capture() as again:
        logger.warning("one stays in float")
    assert captured.get().count("one stays in float") == 1
    assert captured.get().count("other stays in float") == again.get().count("one") == 1
