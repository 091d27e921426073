"""Schemes that vLLM reads: as docs/serving.md has them, and as ``scripts/interop.py`` expects."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from quark.torch.export.containers.vllm import is_read
from quark.torch.quantization.config.description import LayerDescription, describe_layer
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.spec import QuantizationSpec

ROOT = Path(__file__).parents[4]
INT4 = LayerDescription("int4 per group 128 sym")


def document():
    """The rows of the document: layout, scheme, what vLLM does with it."""
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.+?) \|", text, re.M)
    return [
        (layout, name.replace("…", "128"), result)
        for layout, names, result in rows
        for name in re.findall(r"`([a-z0-9_…]+)`", names)
        if name.replace("…", "128") in scheme_names()
    ]


def test_the_document():
    rows = document()
    assert {layout for layout, *_ in rows} == {"quark", "compressed-tensors", "modelopt", "mxfp8"}
    assert {result for *_, result in rows} >= {"run", "read", "–"}
    wrong = [
        (layout, name, result)
        for layout, name, result in rows
        if is_read(layout, [describe_layer(scheme(name))]) == (result == "–")
    ]
    assert wrong == [("mxfp8", "mxfp8", "read, as ModelOpt's MXFP8")]  # a flag says so to vLLM


@pytest.fixture
def rows(monkeypatch):
    """The rows of ``scripts/interop.py`` with vLLM: layout, words, whether it may lack the scheme.

    A cache is refused by machines without AVX-512, and not by vLLM.
    """
    monkeypatch.syspath_prepend(ROOT / "scripts")
    table = import_module("interop_rows")
    found = [row for row in table.rows(["vllm"], []) if row.client == "vllm"]
    return [
        (
            layout,
            describe_layer(table.UNNAMED.get(parts[0]) or scheme(parts[0])),
            expected.may_refuse and len(parts) == 1,
        )
        for _, layout, name, expected in found
        if (parts := name.split(" + "))[0] != "float"
    ]


def test_what_vllm_computed_is_read(rows):
    computed = [(layout, words) for layout, words, may_refuse in rows if not may_refuse]
    assert len(computed) > 40
    assert [row for row in computed if not is_read(row[0], [row[1]])] == []


def test_quark_schemes_that_vllm_lacks_are_not(rows):
    lacking = [words for layout, words, may_refuse in rows if may_refuse and layout == "quark"]
    assert len(lacking) > 5
    assert [words for words in lacking if is_read("quark", [words])] == []


def test_all_layers_count():
    int3 = LayerDescription("int3 per group 128 sym")
    assert is_read("quark", [INT4, INT4])
    assert not is_read("quark", [INT4, int3])


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({"kv_cache": "fp8_e4m3 per tensor static"}, True),
        ({"kv_cache": "int8 per tensor sym static"}, False),
        ({"output": "int8 per tensor sym static"}, False),
        ({"input": "int8 per token sym dynamic"}, False),
    ],
)
def test_other_tensors_count(changes, is_known):
    assert is_read("quark", [LayerDescription(**{"weight": INT4.weight, **changes})]) == is_known


def test_fp8_in_blocks():
    for side, is_known in ((128, True), (32, False)):
        weight = QuantizationSpec(
            "fp8_e4m3", qscheme="per_block", block_size=(side, side), is_dynamic=False
        )
        inputs = QuantizationSpec(
            "fp8_e4m3", qscheme="per_group", group_size=side, ch_axis=-1, is_dynamic=True
        )
        words = describe_layer(QuantizationConfig(weight=weight, input_tensors=inputs))
        assert is_read("fp8", [words]) == is_known


def test_other_layouts():
    assert not is_read("mlx", [INT4])
    assert not is_read("torchao", [])


@pytest.mark.parametrize("layout", ["quark", "awq", "gptq", "compressed-tensors"])
def test_signed_scales_change_nothing(layout):
    """The layouts are the same, and values are codes times scales there too."""
    for name in ("int4_wo_128", "int4_wo_signed_128"):
        assert is_read(layout, [describe_layer(scheme(name))])
