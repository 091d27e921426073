"""The tables of recipes are those of the rows that a benchmark keeps."""

import json
import shutil
import subprocess
import sys

import pytest

from quark.torch.quantization.config.recipes import RECIPES

PAGE = "benchmarks/three_texts_page.py"


def run(root, *flags):
    return subprocess.run(
        [sys.executable, PAGE, *flags], cwd=root, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copied(root, tmp_path):
    """The benchmarks and the README in another place."""
    shutil.copytree(root / "benchmarks", tmp_path / "benchmarks")
    shutil.copy(root / "README.md", tmp_path)
    return tmp_path


def test_pages_have_the_kept_rows(root):
    found = run(root, "--check")
    assert found.returncode == 0, found.stdout + found.stderr


def test_another_row_changes_the_pages(copied):
    kept = copied / "benchmarks" / "three_texts.json"
    models = json.loads(kept.read_text("utf-8"))
    scheme, algorithms = RECIPES["w8a8"]  # measured on one part of the data
    recipe = next(
        row
        for row in models["real"]["rows"]
        if (row["scheme"], row["algorithms"]) == (scheme, [*algorithms]) and "part" not in row
    )
    recipe["texts"]["code"]["kl"] = [123.0] * len(recipe["texts"]["code"]["kl"])
    kept.write_text(json.dumps(models), "utf-8")
    readme, page = copied / "README.md", copied / "benchmarks" / "three_texts.md"
    before = readme.read_text("utf-8"), page.read_text("utf-8")

    found = run(copied, "--check")
    assert found.returncode == 1
    assert "README.md" in found.stderr
    assert "three_texts.md" in found.stderr
    assert (readme.read_text("utf-8"), page.read_text("utf-8")) == before

    assert run(copied).returncode == 0
    assert "| 59, 123, 288 " in readme.read_text("utf-8")
    assert "123.0 ± 0.0" in page.read_text("utf-8")
    assert run(copied, "--check").returncode == 0


def test_a_readme_without_a_place_is_refused(copied):
    readme = copied / "README.md"
    readme.write_text(readme.read_text("utf-8").replace("<!-- recipes -->", ""), "utf-8")
    found = run(copied)
    assert found.returncode != 0
    assert "has no <!-- recipes --> … <!-- end -->" in found.stderr
