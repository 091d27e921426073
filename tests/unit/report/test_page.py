"""The page of a report: whole, alone, the same numbers, and nothing but text from names."""

import copy
import gzip
import json
import re
from base64 import b64decode
from dataclasses import asdict
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import torch

from quark.torch.report.page import PLOTLY, page
from quark.torch.report.weights import histogram

HOSTILE = "model.<script>alert(1)</script>.\"'&</td>q_proj"
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}
VALUES = {"rms": 0.1, "largest": 0.5, "peak": 5.0}
HISTOGRAM = {"limit": 0.5, "before": [1, 2, 1], "after": [0, 4, 0]}


def layer(name, **changes):
    return {
        "name": name,
        "kind": name.rsplit(".", 1)[-1],
        "scheme": {"weight": "int4 per group 32 sym", "input": "", "output": "", "kv_cache": ""},
        "shape": [8, 8],
        "weights": 64,
        "bytes": 36,
        "bits_per_weight": 4.5,
        "values": VALUES,
        "original": VALUES,
        "scales": {
            "count": 2, "zeros": 0, "least": 0.1, "median": 0.1234, "most": 0.2,
            "exponent": -4, "powers": [1, 1],
        },
        "error": {"change": "rounded", "relative": 0.1234, "sqnr": 18.17},
        "inputs": {
            "tokens": 77, "values": VALUES, "error": 0.0321, "clipped": 0.0, "histogram": HISTOGRAM,
            "channels": [{"index": 3, "largest": 9.0, "ratio": 4.5}],
        },
        "output_error": 0.0567,
        "histogram": HISTOGRAM,
        **changes,
    }  # fmt: skip


UNKNOWN = dict.fromkeys(("original", "scales", "error", "inputs", "output_error", "histogram"))
REPORT = {
    "quark": "1",
    "directory": "out",
    "original": "in",
    "model_type": "llama",
    "method": "quark",
    "algorithms": ["awq"],
    "bytes": 1_000_000,
    "original_bytes": 4_000_000,
    "text": {"source": "text.txt", "windows": 2, "tokens": 8},
    "predictions": {
        "perplexity": 11.0,
        "error": 0.2,
        "original": 10.0,
        "change_error": 0.004,
        "kl": 0.0456,
        "kl_error": 0.0012,
        "agreement": 0.875,
        "agreement_error": 0.011,
        "positions": 16,
    },
    "verdict": ["The model is 4.0 times smaller."],
    "worst": [{"name": "a.q_proj", "measure": "output error", "value": 0.0567}],
    "kinds": [{"name": "q_proj", "is_quantized": True, "layers": 2, "parameters": 128, "bytes": 9}],
    "layers": [layer("a.q_proj"), layer("b.q_proj", **UNKNOWN)],
    "floats": [
        {"name": f"{i}.norm", "kind": "norm", "parameters": 4, "bytes": 8, "reason": "a norm"}
        for i in range(3)
    ],
    "experts": {"a.experts": [3, 4]},
    "routers": {"a.experts": 0.9375},
    "advice": [{"text": "Use less.", "flags": "--less a.q_proj", "layers": ["a.q_proj"]}],
    "prompt": "Once upon",
    "continuations": {
        "original": {"text": "a time", "tokens_per_second": 8.5},
        "quantized": {"text": "a tree", "tokens_per_second": 9.5},
    },
    "unseen": {
        "text": 0.054,
        "calibration": 0.021,
        "layers": {"a.q_proj": [0.0612, 0.0234]},
        "tokens": [{"window": 1, "position": 6, "text": "of the", "ratio": 3.46}],
    },
}
BARE = {**REPORT, "original": "", "original_bytes": None, "text": None, "predictions": None}
BARE |= {
    "layers": [layer("b.q_proj", **UNKNOWN)],
    "experts": {},
    "routers": {},
    "worst": [],
    "advice": [],
    "prompt": "",
    "continuations": {},
    "unseen": None,
}


class Read(HTMLParser):
    """Elements of a page, its text by table, and the data it holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.data, self._table, self._place = [], {}, "", None, None
        self.feed(text)
        self.close()
        self.data = gzip.decompress(b64decode(self.data)).decode()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "table":
            self._table = attributes["id"]
            self.tables[self._table] = []
        elif tag == "tr" and self._table:
            self.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self.tables[self._table][-1].append("")
        self._place = (tag, attributes.get("id"))

    def handle_endtag(self, tag):
        self._table = None if tag == "table" else self._table
        self._place = None

    def handle_data(self, data):
        if self._place == ("script", "report"):
            self.data += data
        elif self._table and self.tables[self._table] and self.tables[self._table][-1]:
            self.tables[self._table][-1][-1] += data.strip()


@pytest.mark.parametrize("report", [REPORT, BARE], ids=["full", "bare"])
def test_the_page_holds_the_numbers_and_lists_every_layer(report):
    found = Read(page(report))
    assert json.loads(found.data) == report
    rows = found.tables["layers"][1:]
    assert [row[0] for row in rows] == [layer["name"] for layer in report["layers"]]
    assert {len(row) for row in rows} == {len(found.tables["layers"][0])}


def test_the_tables_show_the_numbers_of_the_report():
    first, unknown = Read(page(REPORT)).tables["layers"][1:]
    assert {"12.34 %", "18.2", "5.67 %", "3.21 %", "4.50", "5.0", "0.123", "77"} <= set(first)
    assert unknown.count("–") >= 9
    (row,) = Read(page(REPORT)).tables["worst"][1:]
    assert row == ["a.q_proj", "output error", "5.67 %"]
    (row,) = Read(page(REPORT)).tables["floats"][1:]
    assert row == ["norm", "3", "12", "24 Bytes", "a norm"]


def test_advice_and_continuations_are_shown():
    written = page(REPORT)
    assert "<br><code><span>--less</span> <span>a.q_proj</span> </code></li>" in written
    assert "<dt>quantized</dt><dd>a tree</dd>" in written
    assert "Advice" not in page(BARE)
    assert "Continuations" not in page(BARE)


@pytest.mark.parametrize("report", [REPORT, BARE], ids=["full", "bare"])
def test_nothing_is_loaded(report):
    found = Read(page(report))
    assert not [tag for tag, attributes in found.tags if LOADING & set(attributes)]
    assert not {"link", "iframe", "img", "object", "base"} & {tag for tag, _ in found.tags}
    (policy,) = (a["content"] for t, a in found.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    style = re.search(r"<style>(.*?)</style>", page(report), re.DOTALL)[1]
    assert not re.search(r"url\(|@import", style)


def test_names_are_text():
    report = copy.deepcopy(REPORT)
    report |= {"directory": HOSTILE, "model_type": HOSTILE, "verdict": [HOSTILE]}
    report["layers"] = [layer(HOSTILE)]
    report["worst"] = [{**REPORT["worst"][0], "name": HOSTILE}]
    report["advice"] = [{"text": HOSTILE, "flags": HOSTILE, "layers": [HOSTILE]}]
    report |= {"prompt": HOSTILE}
    report["continuations"] = {HOSTILE: {"text": HOSTILE, "tokens_per_second": 1.0}}
    report["floats"][0] |= {"name": HOSTILE, "kind": HOSTILE, "reason": HOSTILE}
    report["kinds"][0]["name"] = HOSTILE
    report["experts"] = {HOSTILE: [1]}
    report["routers"] = {HOSTILE: 0.5}
    report["unseen"]["tokens"][0]["text"] = HOSTILE
    hostile, plain = Read(page(report)), Read(page(REPORT))
    assert json.loads(hostile.data) == report
    assert hostile.tables["layers"][1][0] == HOSTILE
    scripts = [[tag for tag, _ in found.tags].count("script") for found in (hostile, plain)]
    assert scripts == [3, 3]


def test_unseen_inputs():
    tables = Read(page(REPORT)).tables
    assert tables["unseen"][1] == ["a.q_proj", "6.12 %", "2.34 %"]
    assert tables["unseen-tokens"][1] == ["of the", "2", "7", "3.5"]
    assert "unseen" not in Read(page(BARE)).tables


def many_layers(count):
    """Layers of a large model, with histograms of normal weights and codes of 4 bits."""
    draw = torch.Generator().manual_seed(0)

    def numbers(*names):
        return dict(zip(names, torch.rand(len(names), generator=draw).tolist(), strict=True))

    def counts():
        weight = torch.randn(100_000, generator=draw)
        return asdict(histogram(weight, weight.mul(3).round().clamp(-8, 7) / 3))

    values, inputs = ("rms", "largest", "peak"), layer("")["inputs"]
    return [
        layer(
            f"model.layers.{index // 7}.mlp.projection_{index % 7}",
            values=numbers(*values),
            original=numbers(*values),
            error={"change": "rounded", **numbers("relative", "sqnr")},
            inputs={**inputs, **numbers("error", "clipped"), "histogram": counts()},
            output_error=numbers("error")["error"],
            histogram=counts(),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [2, 36 * 7], ids=["small", "36 blocks"])
def test_a_page_is_smaller_than_a_megabyte(count):
    assert len(page({**REPORT, "layers": many_layers(count)}).encode()) < 1_000_000


def test_the_charts_are_in_the_bundle():
    """And the bundle has its version and licence with it."""
    folder = files("quark.torch.report")
    bundle = gzip.decompress(folder.joinpath(PLOTLY).read_bytes()).decode()
    assert f"plotly.js (basic - minified) v{re.search(r'basic-(.*).min.js', PLOTLY)[1]}" in bundle
    assert folder.joinpath("plotly/LICENSE").read_text(encoding="utf-8").startswith("MIT License")
    templates = [folder.joinpath(f"{name}.html.jinja") for name in ("page", "comparison")]
    scripts = "".join(path.read_text(encoding="utf-8") for path in templates)
    types = set(re.findall(r'\btype: "(\w+)"', scripts))
    drawn = types - {"data", "category", "log"}  # of error bars and of axes
    assert drawn == {"scatter", "bar"}
    assert drawn <= set(re.findall(r'moduleType:"trace",name:"(\w+)"', bundle))
    assert bundle in [gzip.decompress(b64decode(text)).decode() for text in held(page(REPORT))]


def held(text):
    """The compressed elements of a page."""
    return re.findall(r'<script type="application/gzip" id="\w+">(.*?)</script>', text)
