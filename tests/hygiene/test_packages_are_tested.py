"""Each folder of the package that has code has tests which import from it by its own name."""

import ast

TESTS = ("contract", "unit")


def packages_with_code(trees, packages):
    """Packages of which some module defines a function or a class."""
    return {
        module if module in packages else module.rpartition(".")[0]
        for module, tree in trees.items()
        if any(isinstance(n, (ast.FunctionDef, ast.ClassDef)) for n in ast.walk(tree))
    }


def packages_imported(tree, trees, packages):
    """Packages whose modules a test imports from."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        for name in names:
            if name in trees:
                yield name if name in packages else name.rpartition(".")[0]


def untested(trees, packages, tests):
    """Packages with code that no test imports from."""
    covered = {p for tree in tests for p in packages_imported(tree, trees, packages)}
    return sorted(packages_with_code(trees, packages) - covered)


def test_each_package_has_tests(root, trees):
    packages = {
        ".".join(init.parent.relative_to(root).parts)
        for init in (root / "quark").rglob("__init__.py")
    }
    files = [path for name in TESTS for path in (root / "tests" / name).rglob("test_*.py")]
    tests = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    assert untested(trees, packages, tests) == []


def test_a_package_without_tests_is_found():
    code = "def f():\n    pass"
    texts = {"quark": "", "quark.a": "", "quark.a.x": code, "quark.b": code, "quark.c": "X = 1"}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    packages = {"quark", "quark.a", "quark.b", "quark.c"}

    def missing(*tests):
        return untested(trees, packages, [ast.parse(text) for text in tests])

    assert missing() == ["quark.a", "quark.b"]
    assert missing("from quark.a.x import f") == ["quark.b"]
    assert missing("from quark.a import x", "import quark.b") == []
    assert missing("import quark", "from quark import nothing") == ["quark.a", "quark.b"]
