"""The sources that these tests look at: read, never imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def module_name(path):
    """The dotted name of a file below the root: ``quark/cli/__init__.py`` is ``quark.cli``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files():
    return sorted((ROOT / "quark").rglob("*.py"))


@pytest.fixture(scope="session")
def root():
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def texts():
    """Path below the root -> text, of each file of the package."""
    return {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in package_files()}


@pytest.fixture(scope="session")
def all_texts(texts):
    """The same, with tests, benchmarks and scripts."""
    folders = ("tests", "benchmarks", "scripts")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in paths} == {*folders}
    return texts | {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in paths}


@pytest.fixture(scope="session")
def trees():
    """Name -> syntax tree, of each module of the package."""
    files = package_files()
    assert files, "the package lies beside the tests"
    return {module_name(p): ast.parse(p.read_text(encoding="utf-8")) for p in files}
