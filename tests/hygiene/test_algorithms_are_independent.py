"""No algorithm imports another: shared mathematics and helpers lie in modules of their own."""

import ast
import importlib.util
from pathlib import Path

import pytest

from quark.torch.algorithm.registry import ALGORITHMS

MODULES = {entry.partition(":")[0] for entry in ALGORITHMS.values()}


def imported(source):
    """Full names of the modules that a source text imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def other_algorithms(module, source):
    """Other algorithms that a module imports."""
    return sorted(set(imported(source)) & MODULES - {module})


def source_of(module):
    return Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_algorithm_imports_another(module):
    assert other_algorithms(module, source_of(module)) == []


ALGORITHM, OTHER = sorted(MODULES)[:2]
ROOM, _, NAME = OTHER.rpartition(".")


@pytest.mark.parametrize(
    "text",
    [
        f"from {OTHER} import apply",
        f"from {ROOM} import {NAME}",
        f"import {OTHER} as other",
        f"def f():\n    from {OTHER} import apply",
        f"if TYPE_CHECKING:\n    import {OTHER}",
    ],
    ids=["name", "module", "renamed", "deferred", "typing"],
)
def test_an_import_of_another_is_found(text):
    assert other_algorithms(ALGORITHM, text) == [OTHER]


def test_other_imports_are_free():
    text = f"from {ALGORITHM} import check\nfrom {ROOM}.layers import freeze\nimport torch"
    assert other_algorithms(ALGORITHM, text) == []
