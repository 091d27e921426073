"""The order of the layers: imports go downward only, and never in a circle.

`LAYERS` lists the rooms of the package from the bottom to the top. A module may import from its own
room and from the rooms of lower layers, not from another room of its own layer. This holds for
every kind of import:

- executed when a module is imported;
- for type checkers only, under ``if TYPE_CHECKING:``;
- deferred: inside a function;
- named in a table as ``"module:attribute"``.

No circle within a room either, of any kind of import but tables: a registry names its entries, and
these import what the registry offers.

The faces are package ``__init__`` files that load public names on first use. They import nothing
of the package when they are imported, and may defer to anything.

A new package fails this test until it has a line in `LAYERS`.
"""

import ast
import graphlib
import re
from itertools import permutations
from typing import NamedTuple

import pytest

# From the bottom to the top. A room is a package or a module, with everything below it that has no
# room of its own: "quark.torch.graph" is all of it except rescaling, rotation and discovery.
LAYERS = [
    {"quark.torch.interruption"},
    {"quark.torch.progress"},
    {"quark.torch.digests"},
    {"quark.torch.earlier_output", "quark.torch.replacement"},
    {"quark.torch.numerics", "quark.torch.graph", "quark.torch.files", "quark"},
    {
        "quark.torch.graph.rescaling",
        "quark.torch.graph.rotation",
        "quark.torch.quantization.observer",
    },
    {
        "quark.torch.graph.discovery",
        "quark.torch.quantization.config",
        "quark.torch.kernel",
    },
    {
        "quark.torch.quantization.nn",
        "quark.torch.quantization.graph_mode.passes",
        "quark.torch.quantization.utils",
        "quark.torch.export.config",
        "quark.torch.utils",
    },
    {
        "quark.torch.quantization.preparation",
        "quark.torch.quantization.arguments",
        "quark.torch.quantization.dry_run",
    },
    {"quark.torch.pipeline"},
    {
        "quark.torch.quantization.plan",
        "quark.torch.quantization.cache_scales",
        "quark.torch.evaluation",
    },
    {"quark.torch.algorithm", "quark.torch.quantization.calibration"},
    {"quark.torch.algorithm.rotation"},
    {"quark.torch.algorithm.registry"},
    {
        "quark.torch.quantization.algorithms",
        "quark.torch.quantization.reachability",
        "quark.torch.quantization.model_shape",
        "quark.torch.quantization.trained_ranges",
        "quark.torch.quantization.direct_reads",
        "quark.torch.quantization.sequence_rows",
    },
    {
        "quark.torch.quantization.checks",
        "quark.torch.quantization.group_fit",
        "quark.torch.quantization.parameter_limit",
    },
    {"quark.torch.quantization.graph_mode"},
    {"quark.torch.statistics"},
    {"quark.torch.export.checkpoint.file_versions"},
    {"quark.torch.export.checkpoint.headers"},
    {
        "quark.torch.export.formats.layouts",
        "quark.torch.export.checkpoint.files",
        "quark.torch.export.checks",
        "quark.torch.export.expert_tokens",
    },
    {"quark.torch.export.formats"},
    {"quark.torch.export.checkpoint", "quark.torch.export.main_export"},
    {"quark.torch.export.checkpoint_contents", "quark.torch.export.verification"},
    {"quark.torch.export.gguf", "quark.torch.export.onnx"},
    {"quark.torch.export"},
    {"quark.torch.quantization.api"},
    {
        "quark.torch.quantization.graph",
        "quark.torch.trained_parameters",
        "quark.torch.training",
    },
    {
        "quark.torch.distillation_files",
        "quark.torch.original_predictions",
        "quark.torch.trained_model",
    },
    {"quark.torch.distillation"},
    {
        "quark.torch.report",
        "quark.torch.search",
        "quark.torch.diffusion",
        "quark.demo",
        "quark.conformance",
    },
    {"quark.cli"},
    {"quark.cli.inspect"},
    {"quark.cli.main"},
    {"quark.__main__"},
]
EXACT = {"quark"}  # the version alone: packages below it need a line of their own
FACES = {
    "quark.torch",
    "quark.torch.quantization",
    "quark.torch.quantization.observer",
    "quark.torch.export",
}
REFERENCE = re.compile(r"(quark(?:\.\w+)+):\w+")


class Import(NamedTuple):
    target: str
    line: int
    kind: str  # "executed", "typing", "deferred" or "table"


def room_of(module):
    """The room of a module and its layer, or None if no layer has a room for it."""
    rooms = {room: layer for layer, names in enumerate(LAYERS) for room in names}
    if module in FACES:
        return module, len(LAYERS)
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        room = ".".join(parts[:length])
        if room in rooms and (room == module or room not in EXACT):
            return room, rooms[room]
    return None


def imports(tree, modules):
    """Every import of the package in a module, with the module that it names."""

    def visit(node, kind):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from visit(child, "deferred")
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(ast.Module(child.body, []), "typing")
                yield from visit(ast.Module(child.orelse, []), kind)
            else:
                for target, is_table in targets(child):
                    yield Import(target, child.lineno, "table" if is_table else kind)
                yield from visit(child, kind)

    def targets(node):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                outer = "." * node.level + (node.module or "")
                yield (inner if inner in modules else outer), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            reference = REFERENCE.fullmatch(node.value)
            if reference:
                yield reference[1], True

    for item in visit(tree, "executed"):
        if item.target.split(".")[0] in ("quark", ""):
            yield item


def upward(trees):
    """Imports that do not go downward, and modules without a layer."""
    for module, tree in trees.items():
        own = room_of(module)
        if own is None:
            yield f"{module} has no layer: give its room one in LAYERS"
            continue
        for target, line, kind in imports(tree, trees):
            where = f"{module}:{line} imports {target}"
            other = room_of(target)
            if target not in trees:
                yield f"{where}, which is no module by its full name"
            elif module in FACES and kind == "executed":
                yield f"{where} when it is imported itself"
            elif other and other[0] != own[0] and other[1] >= own[1]:
                place = "above" if other[1] > own[1] else "beside"
                yield f"{where}: {other[0]} is {place} {own[0]}"


def circle(trees):
    """The names along one circle of imports, tables aside, or None.

    The packages of a module are imported before it: their ``__init__`` files are edges too.
    """
    edges = {}
    for module, tree in trees.items():
        parts = module.split(".")
        parents = {".".join(parts[:length]) for length in range(1, len(parts))}
        kinds = {"executed"} if module in FACES else {"executed", "typing", "deferred"}
        named = {item.target for item in imports(tree, trees) if item.kind in kinds}
        edges[module] = (parents | named) & trees.keys() - {module}
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
    assert trees.keys() >= FACES
    rooms = [room for names in LAYERS for room in names]
    assert len(rooms) == len(set(rooms))
    assert [r for r in rooms if not any(f"{m}.".startswith(f"{r}.") for m in trees)] == []


def parse(**modules):
    """Module name with ``__`` for dots -> tree."""
    return {name.replace("__", "."): ast.parse(text) for name, text in modules.items()}


NUMERICS, API = "quark__torch__numerics__scales", "quark__torch__quantization__api"
CONFIG, NN = "quark__torch__quantization__config__spec", "quark__torch__quantization__nn__layer"


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


def inside(room):
    """The name of a module in a room."""
    return room if room in EXACT else f"{room}.sample"


PAIRS = [
    (inside(min(LAYERS[low])), inside(min(LAYERS[high])))
    for low in range(len(LAYERS) - 1)
    for high in (low + 1, len(LAYERS) - 1)
]
BESIDE = [  # sorted: each worker has to collect the tests in one order
    (inside(room), inside(other))
    for names in LAYERS
    for room, other in permutations(sorted(names), 2)
]


@pytest.mark.parametrize(("low", "high"), PAIRS)
def test_every_layer_is_below_the_next(low, high):
    sample = {low: ast.parse(f"import {high}"), high: ast.parse("")}
    (problem,) = upward(sample)
    assert problem.startswith(f"{low}:1 imports {high}: ") and " is above " in problem
    sample = {high: ast.parse(f"import {low}"), low: ast.parse("")}
    assert list(upward(sample)) == []


@pytest.mark.parametrize(("one", "other"), BESIDE)
def test_rooms_of_one_layer_are_independent(one, other):
    sample = {one: ast.parse(f"import {other}"), other: ast.parse("")}
    (problem,) = upward(sample)
    assert problem.startswith(f"{one}:1 imports {other}: ") and " is beside " in problem


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from quark.torch.numerics.scales import x",
        "from quark.torch.quantization.nn.quantizer import TensorQuantizer",
        "def f():\n    import quark.torch.quantization.config.spec",
        "if TYPE_CHECKING:\n    from quark.torch.quantization.config import spec",
        "from quark import __version__",
        "'quark.torch.numerics.scales:x is a sentence'",
    ],
    ids=["other package", "down", "own room", "function", "typing", "version", "text"],
)
def test_a_downward_import_passes(text):
    neighbor = "quark__torch__quantization__nn__quantizer"
    modules = {NN: text, NUMERICS: "", CONFIG: "", neighbor: "", "quark": "__version__ = ''"}
    assert list(upward(parse(**modules))) == []


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"quark__torch__new__room": ""}, "quark.torch.new.room has no layer"),
        ({"quark__torch": "import quark.torch.numerics", "quark__torch__numerics": ""}, "imported"),
        ({NN: "from .quantizer import State"}, "no module by its full name"),
        ({NN: "import quark.torch.gone"}, "no module by its full name"),
    ],
    ids=["unknown room", "eager face", "relative", "missing"],
)
def test_other_problems_are_found(sample, message):
    (problem,) = upward(parse(**sample))
    assert message in problem


def test_a_face_may_defer_to_anything():
    names = "if TYPE_CHECKING:\n    from quark.torch.quantization.api import ModelQuantizer"
    assert list(upward(parse(**{"quark__torch": names, API: ""}))) == []


TYPING_A = "if TYPE_CHECKING:\n    import quark.a"


@pytest.mark.parametrize(
    ("sample", "is_circle"),
    [
        ({"quark__a": "import quark.b", "quark__b": "import quark.a"}, True),
        ({"quark__a": "from quark.b import x", "quark__b": "from quark import a"}, True),
        ({"quark__a": "import quark.b", "quark__b": "import quark.c", "quark__c": ""}, False),
        ({"quark__a": "import quark.b", "quark__b": "def f():\n    import quark.a"}, True),
        ({"quark__a": "import quark.b", "quark__b": "TABLE = {'a': 'quark.a:A'}"}, False),
        ({"quark__a": "import quark.b", "quark__b": TYPING_A}, True),
        (
            {"quark__torch": "if TYPE_CHECKING:\n    import quark.torch.b", "quark__torch__b": ""},
            False,
        ),
        ({"quark__a": "from quark.a.b import x", "quark__a__b": ""}, True),
    ],
    ids=["two", "submodule", "chain", "deferred", "table", "typing", "face", "eager package"],
)
def test_a_circle_is_found(sample, is_circle):
    assert (circle(parse(**sample)) is not None) is is_circle
