"""The operators that stand for quantization in graphs of torch."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from quark.torch.numerics import custom_operators, hadamard, qdq
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.scale_formats import E4M3, E8M0
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.presets import (
    KV_CACHE_SCHEMES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)

GROUPS = Scheme(Dtype.uint4.value, QSchemeType.per_group, axis=-1, group=32, symmetric=False)
INT8 = Scheme(Dtype.int8.value)
NVFP4 = Scheme(Dtype.fp4.value, QSchemeType.per_group, axis=-1, group=16, scale=E4M3)
HALF = Scheme(Dtype.float16.value)
for used in (GROUPS, INT8, NVFP4, HALF):
    custom_operators.with_text(used)  # quantizers do so
SCHEMES = {"int8": INT8, "uint4 groups": GROUPS, "nvfp4": NVFP4, "float16": HALF}
ops = torch.ops.quark


def _schemes_of_presets():
    for name in scheme_names():
        layer = scheme(name)
        for spec in (layer.weight, layer.input_tensors, layer.output_tensors, layer.bias):
            if spec is not None:
                yield from (stage.scheme for stage in spec.stages)
                yield spec.for_parameter().scheme
    yield from (kv_cache_scheme(name).scheme for name in KV_CACHE_SCHEMES)


class TestText:
    def test_every_preset_has_a_text_of_its_own(self):
        schemes = set(_schemes_of_presets())
        assert {Scheme.from_text(s.text) for s in schemes} == schemes
        assert len({s.text for s in schemes}) == len(schemes) > 20

    def test_every_field(self):
        block = Scheme(
            replace(Dtype.bfp16.value, block=16),
            QSchemeType.per_block,
            2,
            64,
            False,
            RoundType.floor,
            (8, -1),
            E8M0,
            "ceil",
            True,
            True,
            True,
        )
        assert Scheme.from_text(block.text) == block

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ('{"fmt": "int9"}', "int9"),
            ('{"fmt": "int8", "qscheme": "per_row"}', "per_row"),
            ('{"fmt": "int8", "scale": {"dtype": "load"}}', "is not a type of torch"),
            ('{"fmt": "int8", "size": 3}', "size"),
            ("int8", "Expecting value"),
        ],
    )
    def test_unknown_names(self, text, problem):
        with pytest.raises((ValueError, KeyError, TypeError), match=problem):
            Scheme.from_text(text)


def _static(x, scheme):
    return qdq.dynamic_qparams(x, scheme) if scheme.fmt.scaled else (None, None)


class TestFakeQuantize:
    @pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
    @pytest.mark.parametrize("shape", [(4, 64), (3, 2, 40), (0, 64)])
    def test_bits(self, scheme, shape):
        x = torch.randn(shape)
        expected = x
        if x.numel():
            expected = qdq.fake_quantize(x, *_static(x, scheme), scheme)
            given = ops.fake_quantize(x, *_static(x, scheme), None, scheme.text)
            assert torch.equal(given, expected) and given.is_contiguous()
        y = ops.fake_quantize(x, None, None, None, scheme.text)
        assert torch.equal(y, expected) and y.is_contiguous()

    def test_transposed_inputs(self):
        x = torch.randn(64, 40).T
        y = ops.fake_quantize(x, None, None, None, GROUPS.text)
        assert y.is_contiguous()
        assert torch.equal(y, qdq.fake_quantize(x, *qdq.dynamic_qparams(x, GROUPS), GROUPS))

    @pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
    def test_definition(self, scheme):
        x = torch.randn(3, 40, requires_grad=True)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        opcheck(ops.fake_quantize, (x, None, None, None, scheme.text), test_utils=checks)
        if scheme.fmt.scaled:
            opcheck(
                ops.is_inside, (x, *_static(x, scheme), None, scheme.text), test_utils=checks[:2]
            )

    @pytest.mark.parametrize("kind", ["static", "dynamic", "cast"])
    def test_gradient(self, kind):
        def loss(x, scale):
            if kind == "dynamic":
                return (custom_operators.fake_quantize_dynamic(x, GROUPS) * x.detach()).sum()
            used = HALF if kind == "cast" else INT8
            scale = None if kind == "cast" else scale
            return (custom_operators.fake_quantize(x, scale, None, used) * x.detach()).sum()

        x, scale = torch.randn(4, 64, requires_grad=True), torch.tensor(0.005)
        (expected,) = torch.autograd.grad(loss(x, scale), x)
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(x, scale), x)
        assert torch.equal(grad, expected)
        assert bool((grad == 0).any()) is (kind == "static")  # values that saturate


def test_codes_and_words():
    x = torch.randn(5, 40)
    scale, zeros = qdq.dynamic_qparams(x, GROUPS)
    codes = qdq.quantize(x, scale, zeros, GROUPS)
    args = codes, scale, zeros, GROUPS.text, torch.bfloat16
    expected = qdq.dequantize(codes, scale, zeros, GROUPS, torch.bfloat16)
    assert torch.equal(ops.dequantize(*args), expected)
    opcheck(ops.dequantize, args, test_utils=("test_schema", "test_faketensor"))
    for name in ("uint4", "int3", "fp6_e2m3"):
        fmt = Dtype[name].value
        codes = torch.randint(0, 4, (5, 40)).to(fmt.code_dtype)
        words = pack(codes, fmt, "order", 0)
        args = words, f'"{name}"', 5, "order", 0
        assert torch.equal(ops.unpack(*args), codes) and torch.equal(
            unpack(*args[:1], fmt, *args[2:]), codes
        )
        opcheck(ops.unpack, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("size", [16, 12])  # 12: of Paley, not symmetric
def test_rotations(size):
    x, rotation = torch.randn(3, 48, requires_grad=True), hadamard.hadamard(size)
    expected = hadamard.rotate(x, rotation)
    opcheck(ops.rotate, (x, rotation), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(ops.rotate(x, rotation), expected)
    (wanted,) = torch.autograd.grad((expected**3).sum(), x)
    (grad,) = torch.autograd.grad((ops.rotate(x, rotation) ** 3).sum(), x)
    torch.testing.assert_close(grad, wanted)
    y = ops.rotate_by_hadamard(x)
    assert torch.equal(y, hadamard.rotate(x, hadamard.hadamard(48)))
    (wanted,) = torch.autograd.grad((hadamard.rotate(x, hadamard.hadamard(48)) ** 3).sum(), x)
    (grad,) = torch.autograd.grad((y**3).sum(), x)
    torch.testing.assert_close(grad, wanted)
