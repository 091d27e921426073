"""Ranges of heads of least squared error."""

from dataclasses import replace

import pytest
import torch

from quark.torch.quantization.config.presets import kv_cache_scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.observer.heads import PerHeadMSEObserver
from quark.torch.quantization.observer.histogram import PerTensorMSEObserver


def spec(dtype="int4", symmetric=True, qscheme="per_head", **rest):
    rest = {"group_size": 8, "is_dynamic": False, **rest}
    return QuantizationSpec(dtype, PerHeadMSEObserver, qscheme=qscheme, symmetric=symmetric, **rest)


def keys(seed=0):
    """Keys of three heads of 8 channels; the first token has one large value in each head."""
    x = torch.randn(2, 30, 24, generator=torch.Generator().manual_seed(seed))
    x[:, 0, ::8] = 15
    return x * torch.tensor([1.0, 3.0, 0.2]).repeat_interleave(8)


@pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("uint4", False), ("fp4", True)])
def test_each_head_is_a_tensor_of_its_own(dtype, symmetric):
    given = None if dtype == "fp4" else symmetric
    observer = PerHeadMSEObserver(spec(dtype, given))
    observer(keys())
    observer(keys(1))
    scale, zeros = observer.calculate_qparams()
    single = QuantizationSpec(dtype, qscheme="per_tensor", symmetric=given, is_dynamic=False)
    for head in range(3):
        alone = PerTensorMSEObserver(single)
        alone(torch.cat([keys(), keys(1)])[..., 8 * head : 8 * head + 8])
        expected = alone.calculate_qparams()
        assert torch.equal(scale[head], expected[0])
        assert (zeros is None) is (expected[1] is None)
        assert zeros is None or torch.equal(zeros[head], expected[1])


@pytest.mark.parametrize(("name", "share"), [("int4_per_head", 0.7), ("fp4_per_head", 0.8)])
def test_schemes_of_four_bits_leave_little_room_for_a_few_large_tokens(name, share):
    def error(given):
        quantizer = TensorQuantizer(given)
        quantizer.is_observing = True
        quantizer(keys())
        quantizer.compute_scales()
        return float((quantizer(keys()) - keys())[:, 1:].square().sum())

    chosen = replace(kv_cache_scheme(name), group_size=8)
    assert chosen.observer_cls is PerHeadMSEObserver
    assert error(chosen) < share * error(replace(chosen, observer_cls=None))


def test_states():
    observer = PerHeadMSEObserver(spec())
    observer(torch.empty(0, 24))
    assert observer.is_empty
    with pytest.raises(RuntimeError, match="No data was observed"):
        observer.calculate_qparams()
    observer(keys())
    assert not observer.is_empty
    observer.reset()
    assert observer.is_empty
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        observer(torch.full((2, 24), torch.nan))


def test_other_granularities_are_refused():
    with pytest.raises(ValueError, match="for static scales with qscheme='per_head'"):
        TensorQuantizer(spec(qscheme="per_tensor", group_size=None))
