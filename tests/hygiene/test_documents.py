"""The documents name files, modules and links that exist, and tables that fit a screen."""

import re
from importlib import import_module
from importlib.util import find_spec

import pytest

WIDEST_CELL = 60  # characters
TABLES = ["README.md", "CONTRIBUTING.md"]
FOLDERS = ("quark", "tests", "scripts", "benchmarks", "docs", "examples")
SHORT = re.compile(r"(?<![\w./-])[a-z_]+(?:/\w+)+\.py\b")  # below quark/torch, as in CONTRIBUTING
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?")
MODULE = re.compile(r"(?<![\w/.-])quark(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def missing_paths(text, root):
    """Paths below the root, or below quark/torch, that a text names and that do not exist."""
    names = {match[0].rstrip("/.") for match in [*PATH.finditer(text), *SHORT.finditer(text)]}
    folders = [root, root / "quark/torch"]
    return sorted(name for name in names if not any((f / name).exists() for f in folders))


def missing_modules(text):
    """Dotted names of modules, or of names in modules, that do not exist."""
    return sorted({name for name in MODULE.findall(text) if not is_importable(name)})


def is_importable(name):
    """Whether a dotted name is a module, or a name in one."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute) or find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def broken_links(text, folder):
    """Relative links that lead to no file."""
    return sorted({link for link in LINK.findall(text) if not (folder / link).exists()})


def wide_cells(text, limit=WIDEST_CELL):
    """Cells of tables that are longer than ``limit`` characters."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = (cell.strip() for row in rows for cell in row.strip("|").split("|"))
    return [cell for cell in cells if len(cell) > limit and set(cell) - set("-: ")]


def documents(root):
    """Path -> text of each document, except the history, which names what is gone."""
    files = [
        *root.glob("*/README.md"),
        root / "tests/data/README.md",
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
    ]
    files.remove(root / "CHANGELOG.md")
    return {file: file.read_text(encoding="utf-8") for file in files}


def test_paths_exist(root):
    problems = {f.name: missing_paths(text, root) for f, text in documents(root).items()}
    assert {name: paths for name, paths in problems.items() if paths} == {}


def test_modules_exist(root):
    problems = {f.name: missing_modules(text) for f, text in documents(root).items()}
    assert {name: modules for name, modules in problems.items() if modules} == {}


def test_links_lead_somewhere(root):
    problems = {f.name: broken_links(text, f.parent) for f, text in documents(root).items()}
    assert {name: links for name, links in problems.items() if links} == {}


@pytest.mark.parametrize("name", TABLES)
def test_cells_fit_a_screen(name, root):
    assert wide_cells((root / name).read_text(encoding="utf-8")) == []


def test_a_wrong_document_is_found(root):
    text = (
        "See `quark/nowhere.py`, `graph/nowhere.py`, `quark.torch.nowhere` and [this](nowhere.md)."
    )
    assert missing_paths(text, root) == ["graph/nowhere.py", "quark/nowhere.py"]
    assert missing_modules(text) == ["quark.torch.nowhere"]
    assert broken_links(text, root) == ["nowhere.md"]
    assert wide_cells(f"| {'x' * 61} | {'y' * 60} |\n| --- | --- |") == ["x" * 61]
