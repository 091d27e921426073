"""Kernels of torch for packed weights: chosen by what this machine computes right."""

import logging

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.nn.products import kernels
from quark.torch.quantization.nn.products.arrangement import Arrangement, pack_planes
from quark.torch.quantization.nn.products.panels import Panels

INT4 = kernels.KERNELS["cpu", "int4, AVX-512"]


@pytest.fixture(autouse=True)
def no_answers_of_other_tests():
    kernels.is_proved.cache_clear()
    yield
    kernels.is_proved.cache_clear()


def replaced(monkeypatch, multiply):
    broken = kernels.KERNELS["cpu", "int8"]._replace(multiply=multiply)
    monkeypatch.setitem(kernels.KERNELS, ("cpu", "int8"), broken)


def test_a_kernel_that_saturates_is_refused_and_logged_once(monkeypatch, caplog):
    right = kernels.KERNELS["cpu", "int8"].multiply

    def saturating(panels, parts, x):  # as sums of pairs of 8-bit products in 16 bits
        limit = 0.9 * right(panels, parts, x).abs().amax()
        return right(panels, parts, x).clamp(-limit, limit)

    replaced(monkeypatch, saturating)
    with caplog.at_level(logging.INFO):
        assert not kernels.is_proved("cpu", "int8", 64, 64)
        assert not kernels.is_proved("cpu", "int8", 64, 64)
    (record,) = caplog.records
    assert "'int8'" in record.message
    assert "error of a sample" in record.message


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_a_kernel_that_this_machine_lacks_is_refused(monkeypatch, error):
    def missing(panels, parts, x):
        raise error("not compiled for this CPU")

    replaced(monkeypatch, missing)
    assert not kernels.is_proved("cpu", "int8", 64, 64)


def test_nan_is_an_error(monkeypatch):
    right = kernels.KERNELS["cpu", "int8"].multiply
    replaced(monkeypatch, lambda *args: right(*args) * float("nan"))
    assert not kernels.is_proved("cpu", "int8", 64, 64)


def test_one_order_of_codes_at_most_is_right():
    """The orders of AVX-512 and AVX2 differ, so a machine reads one of them."""
    names = [name for device, name in kernels.KERNELS if name.startswith("int4")]
    assert len(names) == 2
    assert sum(kernels.is_proved("cpu", name, 256, 128) for name in names) <= 1


@pytest.mark.parametrize(("group", "size"), [(32, 32), (96, 32), (128, 128), (512, 256), (16, 0)])
def test_group_sizes_of_the_kernel_divide_those_of_the_weight(group, size):
    assert INT4.group(Dtype.int4.value, 512, group) == size


def test_other_formats_have_no_kernel():
    rest = [d for d in Dtype if d.name not in ("int4", "uint4", "int8", "mx", "mx9", "bfp16")]
    assert [d for d in rest for k in kernels.KERNELS.values() if k.group(d.value, 64, 64)] == []


def test_factors_of_four_bits_are_scale_and_value_of_code_8():
    to = Arrangement.of_columns(64, 64, 32, 32)
    scale = 2.0 ** torch.arange(-2, 2).repeat(32).view(64, 2)
    zeros = torch.arange(128.0).remainder(16).view(64, 2)
    parts = pack_planes(torch.zeros(1, 64 * 64, dtype=torch.uint8), Dtype.uint4.value)
    parts |= {"scale": to.arrange_factors(scale), "zero_point": to.arrange_factors(zeros)}
    factors = INT4.factors(Panels(Dtype.uint4.value, to, 0, 0), parts)
    assert torch.equal(factors[..., 0].float(), scale.T)
    assert torch.equal(factors[..., 1].float(), ((8 - zeros) * scale).T)
