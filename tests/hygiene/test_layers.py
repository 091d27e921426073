"""The order of the layers: imports go downward only, and never in a circle.

Three kinds of import are told apart:

- executed when a module is imported: downward or within a layer, never in a circle;
- deferred, inside a function, or named in a table as ``"module:attribute"``: downward or within a
  layer, where two modules may need each other (a registry and its entries);
- for type checkers only: the same as deferred ones.

The faces, three package ``__init__`` files which load public names on first use, import nothing
of the package when they are imported, and may defer to anything below.
"""

import ast
import graphlib
import re
from typing import NamedTuple

import pytest

# Layer of each room, by the longest name that a module begins with. Above is importable from
# below in the table only: a module may import from its own layer and from lower ones.
LAYERS = {
    "quark": 0,  # the version alone: see EXACT
    "quark.torch.numerics": 0,
    "quark.torch.graph": 0,
    "quark.torch.quantization.observer": 1,
    "quark.torch.quantization.config": 2,
    "quark.torch.quantization.nn": 3,
    "quark.torch.pipeline": 4,
    "quark.torch.algorithm": 4,
    "quark.torch.quantization.preparation": 5,
    "quark.torch.quantization.calibration": 5,
    "quark.torch.quantization.api": 5,
    "quark.torch.export": 6,
    "quark.torch.evaluation": 6,
    "quark.torch.statistics": 6,
    "quark.torch.search": 6,
    "quark.torch.report": 7,
    "quark.cli": 7,
    "quark.demo": 7,
}
EXACT = {"quark"}
FACES = {"quark.torch": 7, "quark.torch.quantization": 7, "quark.torch.export": 7}
REFERENCE = re.compile(r"(quark(?:\.\w+)+):\w+")


class Import(NamedTuple):
    target: str
    line: int
    executed: bool


def layer_of(module):
    """The layer of a module, or None if the tables have no room for it."""
    if module in FACES:
        return FACES[module]
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        room = ".".join(parts[:length])
        if room in LAYERS and (room == module or room not in EXACT):
            return LAYERS[room]
    return None


def imports(tree, modules):
    """Every import of the package in a module, with the module it leads to."""

    def visit(node, executed):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from visit(child, False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from visit(ast.Module([statement], []), False)
                for statement in child.orelse:
                    yield from visit(ast.Module([statement], []), executed)
            else:
                yield from (Import(t, child.lineno, e and executed) for t, e in targets(child))
                yield from visit(child, executed)

    def targets(node):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules else "." * node.level + (node.module or "")), True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = REFERENCE.fullmatch(node.value)
            if named:
                yield named[1], False

    for found in visit(tree, True):
        if found.target.split(".")[0] in ("quark", ""):
            yield found


def upward(trees):
    """Imports that do not go downward, and modules without a layer."""
    for module, tree in trees.items():
        own = layer_of(module)
        if own is None:
            yield f"{module} has no layer: give its room one in LAYERS"
            continue
        for target, line, executed in imports(tree, trees):
            where = f"{module}:{line} imports {target}"
            if target not in trees:
                yield f"{where}, which is no module by its full name"
            elif module in FACES and executed:
                yield f"{where} when it is imported itself"
            elif layer_of(target) is not None and layer_of(target) > own:
                yield f"{where}, of layer {layer_of(target)} above its own {own}"


def circle(trees):
    """The names along one circle of executed imports, or None. Parents are imported first."""
    edges = {}
    for module, tree in trees.items():
        parts = module.split(".")
        parents = {".".join(parts[:length]) for length in range(1, len(parts))}
        executed = {i.target for i in imports(tree, trees) if i.executed}
        edges[module] = (parents | executed) & trees.keys() - {module}
    try:
        list(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_imports_go_downward(trees):
    assert list(upward(trees)) == []


def test_no_circle(trees):
    assert circle(trees) is None


def test_rooms_and_faces_exist(trees):
    assert set(FACES) <= set(trees)
    assert {room for room in LAYERS if not any(m.startswith(room) for m in trees)} == set()


def parse(**modules):
    """Module name with ``__`` for dots -> tree."""
    return {name.replace("__", "."): ast.parse(text) for name, text in modules.items()}


TYPING = "if TYPE_CHECKING:\n    import quark.a"
NUMERICS, API = "quark__torch__numerics__scales", "quark__torch__quantization__api"
CONFIG, NN = "quark__torch__quantization__config__spec", "quark__torch__quantization__nn__mixin"


@pytest.mark.parametrize(
    "text",
    [
        "import quark.torch.quantization.api",
        "from quark.torch.quantization.api import ModelQuantizer",
        "from quark.torch.quantization import api",
        "class A:\n    from quark.torch.quantization.api import ModelQuantizer",
        "try:\n    import quark.torch.quantization.api\nexcept ImportError:\n    pass",
        "def f():\n    from quark.torch.quantization.api import ModelQuantizer",
        "if TYPE_CHECKING:\n    from quark.torch.quantization.api import ModelQuantizer",
        "TABLE = {'a': 'quark.torch.quantization.api:ModelQuantizer'}",
        "from quark.torch import ModelQuantizer",
    ],
    ids=["module", "name", "submodule", "class", "try", "function", "typing", "table", "face"],
)
def test_an_upward_import_is_found(text):
    sample = parse(
        **{NUMERICS: text, API: "", "quark__torch": "", "quark__torch__quantization": ""}
    )
    (problem,) = upward(sample)
    assert problem.startswith("quark.torch.numerics.scales:")


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from quark.torch.numerics.scales import x",
        "def f():\n    import quark.torch.quantization.config.spec",
        "if TYPE_CHECKING:\n    from quark.torch.quantization.config import spec",
        "from quark import __version__",
        "'quark.torch.numerics.scales:x is a sentence'",
    ],
    ids=["foreign", "down", "function", "typing", "version", "text"],
)
def test_a_downward_import_passes(text):
    sample = parse(**{NN: text, NUMERICS: "", CONFIG: "", "quark": "__version__ = ''"})
    assert list(upward(sample)) == []


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"quark__torch__new__room": ""}, "quark.torch.new.room has no layer"),
        ({"quark__torch": "import quark.torch.numerics", "quark__torch__numerics": ""}, "imported"),
        ({NN: "from .quantizer import State"}, "no module by its full name"),
        ({NN: "import quark.torch.gone"}, "no module by its full name"),
    ],
    ids=["unknown room", "eager face", "relative", "missing"],
)
def test_other_problems_are_found(sample, said):
    (problem,) = upward(parse(**sample))
    assert said in problem


def test_a_face_may_defer_to_anything():
    names = "if TYPE_CHECKING:\n    from quark.torch.quantization.api import ModelQuantizer"
    assert list(upward(parse(**{"quark__torch": names, API: ""}))) == []


@pytest.mark.parametrize(
    ("sample", "is_circle"),
    [
        ({"quark__a": "import quark.b", "quark__b": "import quark.a"}, True),
        ({"quark__a": "from quark.b import x", "quark__b": "from quark import a"}, True),
        ({"quark__a": "import quark.b", "quark__b": "import quark.c", "quark__c": ""}, False),
        ({"quark__a": "import quark.b", "quark__b": "def f():\n    import quark.a"}, False),
        (
            {"quark__a": "import quark.b", "quark__b": "if TYPE_CHECKING:\n    import quark.a"},
            False,
        ),
        ({"quark__a": "from quark.a.b import x", "quark__a__b": ""}, True),
    ],
    ids=["two", "submodule", "chain", "deferred", "typing", "eager package"],
)
def test_a_circle_is_found(sample, is_circle):
    assert (circle(parse(**sample)) is not None) is is_circle
