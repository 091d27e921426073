"""The table of checkpoint formats."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from quark.torch.export.formats.base import ExportFormat, get_format
from quark.torch.export.formats.registry import FORMATS
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads(name):
    made = get_format(name, Config(), JsonExporterConfig())
    assert isinstance(made, ExportFormat)


def test_unknown_format_names_the_nearest():
    with pytest.raises(ValueError, match=r"custom_mode: 'quack' is unknown\. Did you mean 'quark'"):
        get_format("quack", Config(), JsonExporterConfig())


def imports_of(module):
    tree = ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_no_format_imports_another():
    """They share layouts and checks, and those of other tools a base."""
    modules = {path.partition(":")[0] for path in FORMATS.values()}
    imported = {module: imports_of(module) & modules for module in modules}
    assert len(modules) == len(FORMATS) and not any(imported.values()), imported
