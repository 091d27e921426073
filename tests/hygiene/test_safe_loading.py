"""Nothing that is read from a file can run code: no pickle, no evaluation, no import it names."""

import ast

import pytest

PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
BUILTINS = {"__import__", "compile", "eval", "exec"}
# Runs a function that the user names on the command line, with --trust_remote_code alone.
BY_REQUEST = {"quark.cli.quantize.python_entry": ["resolve_name"]}


def unsafe(tree):
    """What a module does that could run code from a file, with line numbers."""
    tables, constants = literal_tables(tree), literal_names(tree)
    scopes = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]
    from_tables = {n for scope in scopes for n in names_from_tables(scope, tables)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in imported(node):
                if name.split(".")[0] in PICKLES or name == "torch.load":
                    yield f"{node.lineno}: import of {name}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in BUILTINS or called.removeprefix("builtins.") in BUILTINS:
                yield f"{node.lineno}: {called}"
            elif called.endswith("torch.load") or called == "torch.serialization.load":
                if given.get("weights_only") != "True":
                    yield f"{node.lineno}: torch.load without weights_only=True"
            elif called.split(".")[-1] == "load" and given.get("allow_pickle", "False") != "False":
                yield f"{node.lineno}: {called} with allow_pickle"
            elif called.split(".")[-1] == "import_module" and not (
                is_ours(node.args[0])
                or ast.unparse(node.args[0]) in from_tables
                or is_entry(node.args[0], tables, constants)
            ):
                yield f"{node.lineno}: import of {ast.unparse(node.args[0])}"
            elif called.split(".")[-1] == "resolve_name":
                yield f"{node.lineno}: resolve_name"


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def literal_tables(tree):
    """Names of the dictionaries at the top of a module that have nothing but strings."""
    tables = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Dict) and all(
            isinstance(item, ast.Constant) and isinstance(item.value, str)
            for item in [*node.value.keys, *node.value.values]
        ):
            tables |= {ast.unparse(target) for target in targets}
    return tables


def literal_names(tree):
    """Names at the top of a module that are bound once, to a string of this package."""
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and is_stored(n)]
    return {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and names.count(node.targets[0].id) == 1
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith("quark.")
    }


def is_stored(name):
    return isinstance(name.ctx, ast.Store)


def is_entry(argument, tables, constants):
    """Whether an argument is an entry of a table below a package: ``f"{PACKAGE}.{TABLE[…]}"``."""
    if not (isinstance(argument, ast.JoinedStr) and len(argument.values) == 3):
        return False
    package, dot, entry = (getattr(part, "value", None) for part in argument.values)
    return (
        isinstance(package, ast.Name)
        and package.id in constants
        and dot == "."
        and isinstance(entry, ast.Subscript)
        and ast.unparse(entry.value) in tables
    )


def names_from_tables(scope, tables):
    """Local names that hold a part of an entry: ``name, … = TABLE[…].partition(":")``."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        while isinstance(value, (ast.Call, ast.Attribute)):
            value = value.func if isinstance(value, ast.Call) else value.value
        if isinstance(value, ast.Subscript) and ast.unparse(value.value) in tables:
            for target in node.targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def is_ours(argument):
    """Whether an argument is a literal, or lies below the module itself: ``f"{__name__}.…"``."""
    if isinstance(argument, ast.Constant):
        return isinstance(argument.value, str)
    return ast.unparse(argument).startswith(("f'{__name__}.", 'f"{__name__}.'))


def test_nothing_unsafe(trees):
    found = {module: list(unsafe(tree)) for module, tree in trees.items()}
    calls = {m: [line.partition(": ")[2] for line in lines] for m, lines in found.items() if lines}
    assert calls == BY_REQUEST, found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.serialization.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "builtins.eval(text)",
        "__import__(name)",
        "compile(text, '', 'exec')",
        "import_module(name)",
        "pkgutil.resolve_name(name)",
        "importlib.import_module(config['module'])",
        "import_module(f'{name}.x')",
        "TABLE = {'a': name}\ndef f(k):\n    m = TABLE[k]\n    import_module(m)",
        "def f(t, k):\n    m = t[k]\n    import_module(m)",
        "P = 'quark.x'\nT = {'a': name}\nimport_module(f'{P}.{T[k]}')",
        "P = 'quark.x'\nT = {'a': 'b'}\nimport_module(f'{P}.{k}')",
        "P = 'os'\nT = {'a': 'b'}\nimport_module(f'{P}.{T[k]}')",
        "P = 'quark.x'\nP = name\nT = {'a': 'b'}\nimport_module(f'{P}.{T[k]}')",
        "T = {'a': 'b'}\nimport_module(f'{package}.{T[k]}')",
    ],
)
def test_unsafe_is_found(text):
    assert len(list(unsafe(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "re.compile('x')",
        "torch.compile(model)",
        "json.load(file)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "import_module('tqdm')",
        "import_module(f'{__name__}.{table[name]}')",
        "P = 'quark.x'\nT: dict[str, str] = {'a': 'b'}\nimport_module(f'{P}.{T[k]}')",
        "T: dict[str, str] = {'a': 'b:c'}\ndef f(k):\n    m, _, n = T[k].partition(':')\n"
        "    import_module(m)",
    ],
)
def test_safe_passes(text):
    assert list(unsafe(ast.parse(text))) == []
