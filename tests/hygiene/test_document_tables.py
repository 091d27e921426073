"""Tables of the documents: options and defaults of the dataclasses, names of the registries."""

import re
from dataclasses import MISSING, fields
from fractions import Fraction

import pytest
import torch

from quark.torch import register_custom_operators
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.distillation import DistillationOptions
from quark.torch.export.formats.registry import FORMATS
from quark.torch.quantization.config import algo
from quark.torch.quantization.config.graph import PassOptions, ShiftLimits
from quark.torch.quantization.observer.registry import OBSERVER_METHODS, OBSERVERS

CODE = re.compile(r"`([^`]+)`")
HEADING = re.compile(r"^#+ ", re.MULTILINE)
# Section of docs/algorithms.md -> classes whose options it lists, by the names of their algorithms.
SECTIONS = {
    "SmoothQuant": {"smooth": algo.SmoothQuantConfig},
    "AutoSmoothQuant": {"autosmoothquant": algo.AutoSmoothQuantConfig},
    "AWQ": {"awq": algo.AWQConfig},
    "Cross-layer equalization": {"cle": algo.CLEConfig},
    "Rotations": {"rotation": algo.RotationConfig, "quarot": algo.QuaRotConfig},
    "Distillation finish": {"distill": DistillationOptions},
    "GPTQ": {"gptq": algo.GPTQConfig},
    "Pruning": {"sparsegpt": algo.SparseGPTConfig, "wanda": algo.WandaConfig},
    "SVDQuant": {"svdquant": algo.SVDQuantConfig},
    "GPTAQ and Qronos": {"gptaq": algo.GPTAQConfig, "qronos": algo.QronosConfig},
    "YAQA": {"yaqa": algo.YaqaConfig},
    "AutoRound": {"autoround": algo.AutoRoundConfig},
    "Joint tuning": {"blockwise_joint_tuning": algo.BlockwiseJointTuningConfig},
}
PARTS = {"online_config": algo.OnlineRotationConfig}  # options that have options


def sections(text):
    """Heading -> text below it, up to the next heading."""
    return {
        part.partition("\n")[0]: part.partition("\n")[2] for part in HEADING.split(text) if part
    }


def rows(text, first):
    """Cells of the rows of the tables whose first column has a heading."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells[0] == first)
        if inside and cells[0] != first and not set(cells[0]) <= set("- :"):
            yield cells


def defaults(cls):
    """Option -> default of a dataclass, but for its name."""
    made = {
        f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(cls)
    }
    made.pop("name", None)
    return made


def literal(text):
    """The value that a cell states; None if it describes the default in words."""
    if text in ("true", "false"):
        return text == "true"
    if CODE.fullmatch(text):
        return text.strip("`")
    try:
        return float(Fraction(text))
    except ValueError:
        return None


def stated(cell, names, algorithm):
    """Return the default that a table has for each of some options of an algorithm."""
    for part in cell.split("; "):
        owner = re.match(r"`(\w+)`: ", part)
        if owner is None:
            chosen = part
        elif owner[1] == algorithm:
            chosen = part[owner.end() :]
            break
    values = chosen.split(", ")
    if len(values) != len(names) or literal(values[0]) is None:
        values = [chosen] * len(names)
    return dict(zip(names, values, strict=True))


def is_default(text, default, same):
    """Whether a cell states a default. ``same`` is that of GPTQ.

    Words stand for options that are not set, and ``false`` for switches that are not set.
    """
    if text == "as in GPTQ":
        return default == same
    value = literal(text)
    if default is None or default in ("", [], {}):
        return value is None or (value is False and default is None)
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def problems(text, classes):
    """Return the differences between a section and the dataclasses."""
    named = set()
    for names_cell, cell, *_ in rows(text, "option"):
        names = CODE.findall(names_cell)
        if " of `" in names_cell:
            names, owners = names[:-1], names[-1:]
        else:
            owners = list(classes)
        known_names = set().union(*(defaults(cls) for cls in (*classes.values(), *PARTS.values())))
        for name in names:
            if name.rpartition(".")[2] not in known_names:
                yield f"{', '.join(owners)}: there is no option {name}"
        for owner in owners:
            for name, value in stated(cell, names, owner).items():
                part, _, option = name.rpartition(".")
                known = defaults(PARTS[part] if part else classes[owner])
                named |= {(owner, name), (owner, part)}
                if option in known and not is_default(
                    value, known[option], defaults(algo.GPTQConfig).get(option)
                ):
                    yield f"{owner}: {name} is {known[option]!r}, not {value}"
    prose = {word for line in text.splitlines() if line[:1] != "|" for word in CODE.findall(line)}
    for owner, cls in classes.items():
        for option in defaults(cls):
            if (owner, option) not in named and option not in prose:
                yield f"{owner}: {option} is missing"


@pytest.fixture(scope="module")
def algorithms(root):
    return (root / "docs/algorithms.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def passes(root):
    return sections((root / "docs/graph-passes.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SECTIONS)
def test_options_of_algorithms(name, algorithms):
    assert [*problems(sections(algorithms)[name], SECTIONS[name])] == []


def test_all_algorithms_are_listed(algorithms):
    listed = {name for cells in rows(algorithms, "name") for name in CODE.findall(cells[0])}
    assert listed == {*ALGORITHMS, "smoothquant"}  # another name of smooth
    with_options = {name for name in ALGORITHMS if defaults(algo.ALGO_CONFIGS[name])}
    assert with_options == {name for classes in SECTIONS.values() for name in classes} - {"distill"}


def test_all_formats_of_other_tools_are_listed(root):
    text = (root / "docs/checkpoint-format.md").read_text(encoding="utf-8")
    table = sections(text)["Formats of other tools"]
    listed = [CODE.findall(cells[0])[0] for cells in rows(table, "`custom_mode`")]
    assert sorted(listed) == sorted({*FORMATS} - {"quark"})


def test_observers(root):
    text = sections((root / "docs/numerics.md").read_text(encoding="utf-8"))["Observers"]
    table = [[CODE.findall(cell) for cell in cells[1:3]] for cells in rows(text, "observer")]
    assert {name for _, classes in table for name in classes} <= {*OBSERVERS}
    methods = {method: classes for methods, classes in table for method in methods}
    assert methods.keys() == OBSERVER_METHODS.keys() - {"histogrampro"}  # the same as histogram
    assert [m for m, classes in methods.items() if OBSERVER_METHODS[m] not in classes] == []


def test_operators_of_graphs(root):
    text = (root / "docs/compile.md").read_text(encoding="utf-8")
    table = [(CODE.findall(names), what) for names, what in rows(text, "operator")]
    in_programs = {name for names, what in table if "alone" not in what for name in names}
    register_custom_operators()
    schemas = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    registered = {name for namespace, name in schemas if namespace == "quark"}
    assert in_programs <= registered <= {name for names, _ in table for name in names}


def test_options_of_passes(passes):
    assert [*problems(passes["Options"], {"passes": PassOptions})] == []


def test_limits_of_shifts(passes):
    listed = {
        CODE.findall(cells[0])[0]: tuple(map(int, cells[-1].split(" to ")))
        for cells in rows(passes["Limits of shifts"], "limit")
    }
    assert listed == defaults(ShiftLimits)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("| 50 |", "| 20 |", "cle: iterations is 50, not 20"),
        ("| false |", "| true |", "cle: absorb_biases is False, not true"),
        ("`iterations`", "`rounds`", "cle: there is no option rounds"),
        ("| `iterations`", "", "cle: iterations is missing"),
    ],
)
def test_a_wrong_table_is_found(before, after, said, algorithms):
    name = "Cross-layer equalization"
    text = sections(algorithms)[name]
    assert before in text
    found = [*problems(text.replace(before, after), SECTIONS[name])]
    assert said in found
