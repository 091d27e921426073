"""The site of the documents is built, with warnings as errors."""

import html
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Page -> its text."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*.html")}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def words(page):
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_every_document_is_a_page(site):
    documents = {f"{path.stem}/index.html" for path in (ROOT / "docs").glob("*.md")}
    assert documents <= set(site)
    assert "Quantize, look, serve" in words(site["index.html"])


def test_the_reference_is_complete(site):
    commands, python = (
        words(site[f"reference-{name}/index.html"]) for name in ("commands", "python")
    )
    for flag in ("--quant_scheme", "--target_bits", "--check_digests", "--log_file"):
        assert flag in commands
    assert "[cyan]" not in commands
    for name in ("ModelQuantizer", "save_statistics", "LLMTemplate", "quantize_model"):
        assert name in python


def test_flags_in_sentences_stay_on_one_line(site):
    whole = '<span style="white-space: nowrap">--num_calib_data</span>'
    assert f"<code>{whole} 32</code>" in site["tutorial/index.html"]


def test_links_to_files_are_called_by_the_titles_of_their_pages(site):
    page = words(site["index.html"])
    assert "measured best for it" in page and "( Choose a scheme )" in page
    text = [re.sub(r"<(code|pre)\b.*?</\1>", "", page, flags=re.DOTALL) for page in site.values()]
    assert [link for page in text for link in re.findall(r"<a [^>]*>[\w/-]+\.md</a>", page)] == []


def test_dates_in_tables_stay_on_one_line(site):
    page = site["serving/index.html"]
    dates = re.findall(r"<td>(.*?2026-11-\d\d.*?)</td>", page)
    assert len(dates) >= 5
    assert all(date.startswith('<span style="white-space: nowrap">2026-') for date in dates)


def test_links_between_files_lead_to_pages():
    target = run_path(str(ROOT / "scripts/site_pages.py"))["target"]
    assert target(Path(), "docs/report.md") == "report.md"
    assert target(Path("docs"), "report.md") == "report.md"
    assert target(Path("docs"), "../benchmarks/README.md") == "benchmarks.md"
    assert target(Path("benchmarks"), "../README.md") == "index.md"
    assert target(Path(), "docs/size-and-loss.svg") == "size-and-loss.svg"
    assert target(Path(), "tests/device") == "contributing.md"
    assert target(Path("docs"), "") == ""
