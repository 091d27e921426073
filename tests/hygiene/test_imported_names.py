"""Benchmarks, scripts and examples import names that exist: no other test runs all of them."""

import ast
from importlib import import_module
from importlib.util import find_spec


def missing_names(text):
    """The names that a file imports from the package, outside of functions, and that are not there.

    Functions may import from other software of the same name, in environments of their own.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quark":
            module = import_module(node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = hasattr(module, "__path__") and find_spec(name) is not None
                if not hasattr(module, alias.name) and not is_module:
                    yield name


def test_imported_names_exist(root):
    folders = ("benchmarks", "scripts", "examples")
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert sum("\nfrom quark." in text for text in texts.values()) > 20
    assert {n: found for n, text in texts.items() if (found := [*missing_names(text)])} == {}


def test_a_name_that_is_not_there_is_found():
    lines = ("from quark.torch import ModelQuantizer, Nothing", "from quark.torch.files import no")
    text = "\n".join([*lines, "def f():", "    from quark import x"])
    assert [*missing_names(text)] == ["quark.torch.Nothing", "quark.torch.files.no"]
