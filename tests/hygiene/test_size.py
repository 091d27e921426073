"""Files and functions stay short enough to be read at once."""

import ast
from pathlib import Path

MAX_FILE, MAX_FUNCTION = 400, 60  # lines


def long_files(texts, limit=MAX_FILE):
    """Files of more than ``limit`` lines."""
    lengths = {path: len(text.splitlines()) for path, text in texts.items()}
    return [f"{path}: {length} lines" for path, length in lengths.items() if length > limit]


def long_functions(trees, limit=MAX_FUNCTION):
    """Functions of more than ``limit`` lines, from ``def`` to their end."""
    return [
        f"{module}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > limit
    ]


def test_files_are_short(all_texts):
    assert long_files(all_texts) == []


def test_functions_are_short(all_texts):
    """Documented examples, in ``tests/contract``, are one function as they are documented."""
    texts = {p: text for p, text in all_texts.items() if Path(p).parts[:2] != ("tests", "contract")}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    assert long_functions(trees) == []


def test_a_long_file_is_found():
    assert long_files({"a.py": "x\n" * 400, "b.py": "x\n" * 401}) == ["b.py: 401 lines"]


def test_a_long_function_is_found():
    def function(lines):
        return "def f():\n" + "    x\n" * (lines - 1)

    nested = "class A:\n    async def g(self):\n" + "        x\n" * 60
    samples = {"short": function(60), "long": function(61), "nested": nested}
    trees = {name: ast.parse(text) for name, text in samples.items()}
    assert long_functions(trees) == ["long.f: 61 lines", "nested.g: 61 lines"]
