"""An option that is accepted acts, is refused, or warns: none is stored and forgotten.

A field counts as read where any code of the package loads an attribute of its name, outside of
code that only stores, normalizes or writes it: assignments to the field itself, ``to_dict`` and
``from_dict``.
Fields of equal names in several classes are not told apart.
"""

import ast

import pytest

from quark.cli.quantize import compatibility as flags
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.quantization.config import compatibility as options
from quark.torch.quantization.config.algo import ALGO_CONFIGS

ROOMS = ("quark.torch.quantization.config", "quark.cli")
RESULTS = {"quark.torch.quantization.config.description"}  # describes options, and has none
SERIALIZATION = {"to_dict", "from_dict"}
# Class -> fields that need no reader, for a reason.
EXEMPT = {
    "ExporterConfig": {"onnx_export_config"},  # its class has no fields
}


def is_dataclass(node):
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def declared(trees, rooms=ROOMS):
    """(Name of the class, name of the field) of all dataclasses of some rooms."""
    return [
        (node.name, statement.target.id)
        for module, tree in trees.items()
        if module.startswith(rooms) and module not in RESULTS
        for node in ast.walk(tree)
        if is_dataclass(node)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and statement.simple
    ]


def loads(node, assigned=frozenset()):
    """Names of attributes that are read below a node, but for those that are assigned anew."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in SERIALIZATION:
            continue
        targets = assigned
        if isinstance(child, ast.Assign):
            targets = {t.attr for t in child.targets if isinstance(t, ast.Attribute)}
        is_load = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load)
        if is_load and child.attr not in targets:
            yield child.attr
        if isinstance(child, ast.Call) and ast.unparse(child.func) == "getattr":
            yield from (a.value for a in child.args if isinstance(a, ast.Constant))
        yield from loads(child, targets)


def unread(trees, handled=frozenset()):
    """The fields that no code reads and that no table handles."""
    read = {name for tree in trees.values() for name in loads(tree)}
    return [
        f"{cls}.{field}"
        for cls, field in declared(trees)
        if field not in read and (cls, field) not in handled
    ]


def in_tables():
    """The fields that warn or raise if they have another value than their default."""
    tables = [EXEMPT, options.IGNORED, options.REFUSED]
    handled = {(cls, name) for table in tables for cls, names in table.items() for name in names}
    return handled | {("CompatibilityFlags", name) for name in {*flags.NOTED, *flags.REFUSED}}


def of_missing_algorithms(trees):
    """The options of algorithms that are refused as a whole, since this version has them not."""
    missing = {cls.__name__ for name, cls in ALGO_CONFIGS.items() if name not in ALGORITHMS}
    return {(cls, field) for cls, field in declared(trees) if cls in missing}


def test_every_option_acts(trees):
    assert unread(trees, in_tables() | of_missing_algorithms(trees)) == []


def test_tables_name_fields_that_exist(trees):
    assert in_tables() - {*declared(trees)} == set()


def test_tables_are_needed(trees):
    """What a table handles has no reader, unless another class has a field of the same name."""
    fields = [field for _, field in declared(trees)]
    lost = {name.split(".")[1] for name in unread(trees)}
    read = set(fields) - lost
    handled = {field for _, field in in_tables() if fields.count(field) == 1}
    named_elsewhere = {"native_linear_mode"}  # a field of RuntimeOptions
    assert handled & read <= {"softmax_quant_spec", "quant_flow", "quant_mode"} | named_elsewhere


def parse(text, reader=""):
    source = f"@dataclass\nclass Options:\n    kept: int = 0\n    lost: int = 0\n{text}"
    return {
        "quark.torch.quantization.config.sample": ast.parse(source),
        "quark.torch.reader": ast.parse(f"def run(o):\n    return o.kept\n{reader}"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "    def __post_init__(self):\n        self.lost = int(self.lost)",
        "    def to_dict(self):\n        return {'lost': self.lost}",
        "    def set(self):\n        self.lost = 3",
    ],
    ids=["nothing", "normalized", "written", "assigned"],
)
def test_an_option_that_nothing_reads_is_found(text):
    assert unread(parse(text)) == ["Options.lost"]


@pytest.mark.parametrize(
    "reader",
    [
        "def more(o):\n    return o.lost",
        "def more(o):\n    return getattr(o, 'lost', None)",
        "def more(o):\n    if o.lost:\n        raise ValueError",
    ],
    ids=["read", "getattr", "refused"],
)
def test_an_option_that_is_read_passes(reader):
    assert unread(parse("", reader)) == []


def test_an_option_of_a_table_passes():
    assert unread(parse(""), {("Options", "lost")}) == []
