"""``quark demo``: the table, and a checkpoint that loads."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from quark.cli import console
from quark.cli.demo import command, material

NAMES = ["original", "fp8", "int4_wo_128"]


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(material, "WINDOWS", 2)  # errors need two


def test_the_table_and_the_checkpoint(quark, tmp_path):
    path = tmp_path / "kept"
    picture = tmp_path / "losses.svg"
    page = tmp_path / "page.html"
    flags = [
        "--output",
        page,
        "--schemes",
        "fp8, int4_wo_128",
        "--keep",
        "int4_wo_128",
        "--output_dir",
        path,
    ]
    result = quark("demo", *flags, "--picture", picture)
    assert result.exit_code == 0, result.output
    rows = re.findall(
        r"^ +(\S+) +([\d.]+) +([\d.]+ MB) +([\d.]+)(?: +([+-][\d.]+ %) ± ([\d.]+) % +([\d.]+) s)?",
        result.stdout,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == NAMES
    assert [row[1] for row in rows] == ["16.00", "8.00", "4.28"]
    before, _, after = (float(row[3]) for row in rows)
    assert 1 < before < after < 2 * before
    assert rows[2][4] == f"{100 * (after / before - 1):+.1f} %"
    assert "the same, bit for bit" in result.stdout
    lines = re.findall(r"Raise an exception if (\S+)", " ".join(result.stdout.split()))
    assert len(lines) == 2
    shown = page.read_text(encoding="utf-8")
    assert all(f"<dt>{name}</dt><dd>{lines[name != 'original']}" in shown for name in NAMES)
    assert all(row[3] in shown for row in rows)
    assert "tokens/s</button>" not in shown  # models in memory unpack nothing, so it says nothing
    found = json.loads(quark("inspect", path, "--json").stdout)
    assert found["schemes"][0]["scheme"]["weight"] == "int4 per group 128 sym"
    assert f"{found['bytes'] / 1e6:.1f} MB" == rows[2][2]
    assert "<title>int4_wo_128: 4.281 bits, " in picture.read_text(encoding="utf-8")


def test_speed(quark, tmp_path, monkeypatch):
    """The real model's demo times each scheme from packed codes; here the shipped model does."""
    timed = replace(material.SHIPPED, is_timed=True)
    monkeypatch.setattr(command, "SHIPPED", timed)
    page = tmp_path / "page.html"
    result = quark("demo", "--schemes", "int8_wo,int4_wo_128", "--output", page)
    assert result.exit_code == 0, result.output
    assert re.search("quantized in +tokens/s", result.stdout.partition("original")[0])
    rows = re.findall(r"^ +(original|int8_wo|int4_wo_128) +\d.* ([\d.]+) *$", result.stdout, re.M)
    assert [row[0] for row in rows] == ["original", "int8_wo", "int4_wo_128"]
    assert all(float(row[1]) > 0.1 for row in rows)
    assert "Tokens per second are those of the runtime fast" in " ".join(result.stdout.split())
    shown = page.read_text(encoding="utf-8")
    assert "tokens/s</button>" in shown and all(row[1] in shown for row in rows)


def test_on_a_terminal_the_table_fills_in_place(quark, monkeypatch, tmp_path):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, force_terminal=True, width=100))
    page = tmp_path / "page.html"
    result = quark("demo", "--schemes", "int8_wo", "--output", page)
    assert result.exit_code == 0, result.output
    shown = screen.getvalue()
    assert shown.count("int8_wo") > 2  # once in each state of the table
    assert "\x1b[1A" in shown  # the cursor goes up to draw over it
    last = shown.rpartition("bits/weight")[2]
    assert re.search(r"int8_wo +8\.1\d +5\.3 MB +[\d.]+ +[+-][\d.]+ % ± [\d.]+ % +[\d.]+ s", last)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--schemes", "fp8,fp9"], "Did you mean 'fp8'?"),
        (["--schemes", ""], "--schemes is empty"),
        (["--schemes", "fp8", "--keep", "int8"], "'int8' is not among the schemes: fp8"),
        (["--output_dir", "."], "is in use"),
        (["--output", "nowhere/page.html"], "there is no directory nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(flags, said, refused):
    assert said in refused("demo", *flags)


def test_only_pages_of_demos_are_replaced(quark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "quark-demo.html"
    page.write_text('<meta name="generator" content="quark">')
    result = quark("demo", "--schemes", "fp8")
    assert result.exit_code == 2
    assert "quark-demo.html exists" in " ".join(result.stderr.split())
    page.unlink()
    for _ in range(2):
        assert quark("demo", "--schemes", "fp8", "--json").exit_code == 0
    assert list(tmp_path.iterdir()) == [page]


def test_every_scheme_by_default_is_known():
    from quark.torch.quantization.config.presets import scheme_names

    for shown in (material.SHIPPED, material.REAL):
        assert set(shown.schemes) <= set(scheme_names())
        assert shown.exported in shown.schemes
