"""What does not matter changes no code: a table of relations and formats.

A row is a change (``relations.py``), a column a scheme in a layout. The ordinary tests run a slice,
``-m nightly`` every cell for two architectures.
"""

import json
from pathlib import Path

import pytest

import quark.cli
from tests.metamorphic import relations
from tests.metamorphic.relations import Case, files_of, make, tensors_of, values_of

TABLE = json.loads((Path(quark.cli.__file__).parent / "schemes.json").read_text("utf-8"))
ROWS = {row["name"]: row for row in TABLE["quant_scheme"]}
# Every format and layout; of other group sizes and of formats of the same kind, one.
SCHEMES = (
    *("int4_wo_32", "uint4_wo_32", "int3_wo_32", "int2_wo_32", "int5_wo_32", "int8_wo"),
    *("int4_wo_per_channel", "int8", "ptpc_int8", "fp8", "fp8_wo", "ptpc_fp8", "int4_fp8"),
    *("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mx6", "mx9", "bfp16", "amdfp4"),
    *("nvfp4", "nvfp4_weight_only", "float16", "iq4_nl"),
)
FAMILIES = ("llama", "mixtral")
REFUSED = [("mixtral", "torchao")]  # torchao stacks experts: test_torchao.py has the refusal
CASES = [
    Case(family, scheme, layout)
    for family in FAMILIES
    for scheme in SCHEMES
    for layout in ROWS[scheme]["layouts"]
    if (family, layout) not in REFUSED
]
SOLVED = [Case(family, "int4_wo_32", "quark", solved=True) for family in FAMILIES]

QUICK = {
    "other_batches": [Case("llama", "fp8", "quark"), Case("llama", "nvfp4", "modelopt")],
    "other_source_shards": [Case("llama", "int4_wo_32", "awq")],
    "in_parts": [Case("llama", "mxfp8", "mxfp8")],
    "from_files": [Case("llama", "mxfp4", "compressed-tensors")],
    "killed_and_resumed": SOLVED[:1],
    "two_threads": [Case("llama", "mx9", "quark")],
    "on_another_device": [Case("llama", "ptpc_int8", "quark")],
    "in_another_process": [],
    "read_again": [
        Case("llama", "uint4_wo_32", "gptq"),
        Case("llama", "fp8", "fp8"),
        Case("mixtral", "int4_wo_32", "mlx"),
    ],
    "read_from_other_files": [Case("llama", "nvfp4", "compressed-tensors")],
    "in_float32": [Case("llama", "int8_wo", "gptq")],
}


def is_of_weights(case):
    """Whether the codes depend on the weights alone."""
    return not ROWS[case.scheme]["needs_data"] and not case.solved


def cases_of(relation):
    """Return the cases that a relation holds for."""
    if relation == "killed_and_resumed":
        return SOLVED
    # Products of data may round otherwise, and devices have other activation functions.
    if relation in ("from_files", "two_threads", "on_another_device"):
        return [case for case in CASES if is_of_weights(case)]
    if relation == "in_float32":  # products of data do
        return [case for case in CASES if is_of_weights(case) and case.scheme != "float16"]
    solved = SOLVED if relation not in ("read_again", "read_from_other_files") else []
    return [*CASES, *solved]


def marked(relation, case, is_quick):
    name = f"{relation} {case.family} {case.scheme} {case.layout}{' gptq' * case.solved}"
    return pytest.param(relation, case, id=name, marks=[] if is_quick else pytest.mark.nightly)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Make the files of a case once."""
    known = {}

    def made(case):
        if case not in known:
            known[case] = make(case, tmp_path_factory.mktemp("made"))
        return known[case]

    return made


@pytest.mark.parametrize(
    ("relation", "case"),
    [
        marked(relation, case, case in quick)
        for relation, quick in QUICK.items()
        for case in cases_of(relation)
    ],
)
def test_relation(made, tmp_path, relation, case):
    material = made(case)
    result = getattr(relations, relation)(material, tmp_path / "result")
    expected = tensors_of(material.expected)
    assert expected
    if relation == "in_float32":  # parameters that are not quantized are in float32
        codes = [name for name in expected if "proj" in name]
        assert codes and all(tensors_of(result)[n] == expected[n] for n in codes)
    else:
        assert tensors_of(result) == expected
    if relation in ("read_again", "other_batches", "in_another_process"):
        assert files_of(result) == files_of(material.expected)


PAIRS = [
    (case, other)
    for case in CASES
    for other in ROWS[case.scheme]["layouts"]
    if other != case.layout and case.family == "llama"
]
CT = "compressed-tensors"
CODES = ("proj.weight", "proj.weight_packed", "proj.weight_scale")  # of NVFP4
QUICK_PAIRS = [
    (Case("llama", "nvfp4_weight_only", "modelopt"), "compressed-tensors"),
    (Case("llama", "mxfp8", "mxfp8"), "modelopt"),
    (Case("llama", "int4_wo_32", "quark"), "awq"),
]


@pytest.mark.parametrize(
    ("case", "other"),
    [
        pytest.param(
            case,
            other,
            id=f"{case.scheme} {case.layout} {other}",
            marks=[] if (case, other) in QUICK_PAIRS else pytest.mark.nightly,
        )
        for case, other in PAIRS
    ],
)
def test_converted_and_back(made, tmp_path, case, other):
    material = made(case)
    result = relations.converted_and_back(other, material, tmp_path / "result")
    if case.scheme.startswith("nvfp4") and CT in (other, case.layout):
        # The layout stores reciprocals of tensor scales, which may differ in their last bit.
        same = {n: t for n, t in tensors_of(material.expected).items() if n.endswith(CODES)}
        assert len(same) == 28
        assert {n: t for n, t in tensors_of(result).items() if n in same} == same
    elif (
        case.layout == "quark"
    ):  # it keeps the offset of codes that other layouts have without sign
        assert values_of(result) == values_of(material.expected)
    else:
        assert tensors_of(result) == tensors_of(material.expected)
