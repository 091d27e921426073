"""What pages show in headless Chromium, on a phone and on a desk.

``npm install`` in this directory installs the browser; tests are skipped without it.
"""

import json
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from quark.cli.demo import material
from quark.cli.main import app
from quark.demo.text import model_directory

HERE, MODEL = Path(__file__).parent, model_directory()
WINDOWS = ("--seq_len", 64, "--limit", 3)
WIDTHS = pytest.mark.parametrize("width", [390, 1280])
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        shutil.which("node") is None or not (HERE / "node_modules").is_dir(),
        reason="needs node, and npm install in tests/browser",
    ),
]


def measure(pages, width):
    """Return what pages of some width show, and what goes wrong."""
    command = ["node", str(HERE / "measure.mjs"), str(width), *map(str, pages)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=HERE)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def show(page, width):
    """Return what a page of some width shows; nothing goes wrong, and nothing is loaded."""
    [shown] = measure([page], width)
    assert shown["errors"] == []
    assert shown["width"] <= width, "the page scrolls sideways"
    assert shown["faults"] == [], "texts of charts"
    assert shown["sideways"] == [], "tables that scroll sideways"
    return shown


def quark(*command):
    """Run the command line."""
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a report on the shipped model, and its numbers."""
    path = tmp_path_factory.mktemp("report")
    shutil.copy(HERE.parents[1] / "README.md", path / "text.txt")
    made = ("--model_dir", MODEL, "--output_dir", path / "int4", "--quant_scheme", "int4_wa_32")
    quark("quantize", *made, "--skip_evaluation")
    given = ("--original", MODEL, "--dataset", path / "text.txt", *WINDOWS)
    quark("report", path / "int4", *given, "--output", path / "page.html")
    return path / "page.html", json.loads((path / "page.json").read_text("utf-8"))


@WIDTHS
def test_a_report(width, report):
    page, numbers = report
    shown = show(page, width)
    text = " ".join(shown["text"].split())
    assert all(" ".join(sentence.split()) in text for sentence in numbers["verdict"])
    assert (
        "Only 3 windows of text: each standard error (±) is itself uncertain by about 50%."
        in (numbers["verdict"][3])
    )
    assert all(layer["name"] in text for layer in numbers["layers"])
    assert all(" ".join(row["text"].split()) in text for row in numbers["advice"])
    by_layer = shown["charts"]["by-layer"]
    assert "output error" in by_layer and "layers.0" in by_layer and "layers.1" in by_layer
    assert "%" in by_layer  # the axis has numbers
    assert "q_proj" in shown["charts"]["sizes"]
    assert "Not measured" not in text


@WIDTHS
def test_a_comparison(width, report, tmp_path):
    page, made, long = tmp_path / "page.html", report[0].parent, tmp_path / ("long-" * 9 + "int2")
    quark("quantize", "--model_dir", MODEL, "--output_dir", long,
          "--quant_scheme", "int2_wo_32", "--skip_evaluation")  # fmt: skip
    given = ("--dataset", made / "text.txt", *WINDOWS, "--layers", "--speed")
    quark("compare", MODEL, made / "int4", long, *given, "--output", page)
    shown = show(page, width)
    numbers = json.loads(page.with_suffix(".json").read_text("utf-8"))
    perplexities = [f"{model['predictions']['perplexity']:.2f}" for model in numbers["models"]]
    assert len(perplexities) == 3
    assert all(figure in shown["text"] for figure in perplexities)
    assert len(shown["charts"]) == 2
    assert all(chart.count("long-") == 9 for chart in shown["charts"].values())
    assert all("int4" in chart and "int2" in chart for chart in shown["charts"].values())
    assert "Only 3 windows of text" in shown["text"]
    assert "computed by the runtime exact of Quark" in shown["text"]


@WIDTHS
def test_a_report_of_weights_alone(width, report, tmp_path):
    """What was not measured is said in a line, without empty charts."""
    quark("report", report[0].parent / "int4", "--output", tmp_path / "page.html")
    shown = show(tmp_path / "page.html", width)
    assert "Not measured: inputs, widest channels of inputs." in shown["text"]
    assert set(shown["charts"]) == {"by-layer", "sizes", "weights", "scales"}


@WIDTHS
def test_many_blocks(width, tmp_path):
    """The axis of a deep model with a long name shows the names that fit."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=40,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "deep")
    names = "--model_dir", tmp_path / "deep", "--output_dir", tmp_path / ("long-" * 8 + "name")
    quark("quantize", *names, "--quant_scheme", "int4_wo_32", "--skip_evaluation")
    quark("report", names[3], "--original", names[1], "--output", tmp_path / "page.html")
    by_layer = show(tmp_path / "page.html", width)["charts"]["by-layer"]
    assert "layers.0" in by_layer
    assert 3 <= by_layer.count("layers.") <= (5 if width < 700 else 20)


@WIDTHS
def test_the_page_of_the_demo(width, tmp_path, monkeypatch):
    monkeypatch.setattr(material, "WINDOWS", 2)
    quark("demo", "--schemes", "int8_wo,int2_wo_32", "--output", tmp_path / "page.html")
    shown = show(tmp_path / "page.html", width)
    assert all(name in shown["charts"]["sizes"] for name in ("int8_wo", "int2_wo_32"))
    assert "1000" in shown["charts"]["sizes"]  # ticks of the logarithmic axis are whole numbers
    assert "Every model continues: Raise an exception if" in shown["text"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Addresses of the pages of the documents, on this machine."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    subprocess.run(command, cwd=HERE.parents[1], capture_output=True, check=True)
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("index.html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield [f"http://127.0.0.1:{server.server_port}/{name}" for name in names]
        server.shutdown()


@WIDTHS
def test_the_site(width, site):
    """No page of the documents scrolls sideways, fails, or loads from elsewhere."""
    measured = dict(zip(site, measure(site, width), strict=True))
    assert len(measured) >= 25
    assert {page: m["errors"] for page, m in measured.items() if m["errors"]} == {}
    assert [page for page, m in measured.items() if m["width"] > width] == []
    assert all(len(m["text"]) > 500 for m in measured.values())
