"""The states of a quantizer: fresh, observing, calibrated, dynamic, disabled."""

import copy
import math

import pytest
import torch

from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scales import block_range, qparams_from_range
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor, TensorQuantizer
from quark.torch.quantization.observer.observer import PerGroupMinMaxObserver, PlaceholderObserver

GROUP = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16}
SPECS = {
    "int8 per tensor": {"dtype": "int8", "qscheme": "per_tensor"},
    "uint8 asymmetric": {"dtype": "uint8", "qscheme": "per_tensor", "symmetric": False},
    "int4 per channel": {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0},
    "uint4 per group": {"dtype": "uint4", "symmetric": False, **GROUP},
    "fp8 per tensor": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
}
TYPES = [torch.float32, torch.bfloat16, torch.float16]
each_spec = pytest.mark.parametrize("name", SPECS)


def make(name="int8 per tensor", **options):
    return TensorQuantizer(QuantizationSpec(**SPECS[name], **options))


def observe(quantizer, *batches):
    quantizer.is_observing = True
    for x in batches:
        assert quantizer(x) is x
    return quantizer


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@each_spec
def test_static_without_a_scale(name):
    quantizer = make(name)
    assert quantizer.needs_data and not quantizer.is_dynamic
    assert quantizer.scale is None and quantizer.zero_point is None
    with pytest.raises(RuntimeError, match="A static quantizer has no scale yet"):
        quantizer(torch.randn(4, 32))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@each_spec
def test_observe_settle_quantize(name, kind):
    quantizer = make(name)
    batches = [torch.randn(4, 32).to(kind), 3 * torch.randn(4, 32).to(kind)]
    observe(quantizer, *batches).compute_scales()
    assert not quantizer.is_observing
    scheme = quantizer.scheme
    (lo_a, hi_a), (lo_b, hi_b) = (block_range(x, scheme) for x in batches)
    scale, zero_point = qparams_from_range(lo_a.minimum(lo_b), hi_a.maximum(hi_b), scheme)
    scales = quantizer.scale, quantizer.zero_point
    assert same(quantizer.scale, scale)
    assert quantizer.zero_point is zero_point or same(quantizer.zero_point, zero_point)
    x = torch.randn(4, 32).to(kind)
    assert same(quantizer(x), fake_quantize(x, *scales, scheme))
    assert quantizer.scale is scales[0], "quantizing moved the scale"


def test_settled_numbers():
    quantizer = make("uint8 asymmetric")
    observe(quantizer, torch.tensor([-1.0, 0.0]), torch.tensor([0.5, 4.1])).compute_scales()
    assert quantizer.scale.item() == pytest.approx(5.1 / 255)
    assert quantizer.zero_point.item() == 50
    assert quantizer(torch.tensor([0.0, 0.011, -7.0, 7.0])).tolist() == pytest.approx(
        [0.0, 0.02, -1.0, 4.1]
    )


@each_spec
def test_settling_without_data(name):
    with pytest.raises(RuntimeError, match="No data was observed"):
        make(name).compute_scales()


def test_settling_on_nan():
    quantizer = observe(make(), torch.tensor([1.0, math.nan]))
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        quantizer.compute_scales()
    assert quantizer.scale is None


@each_spec
def test_dynamic_takes_the_scale_of_each_tensor(name):
    quantizer = make(name, is_dynamic=True)
    assert quantizer.is_dynamic and not quantizer.needs_data
    for magnitude in (1e-3, 1.0, 1e3):
        x = torch.randn(4, 32) * magnitude
        scale, zero_point = dynamic_qparams(x, quantizer.scheme)
        assert same(quantizer(x), fake_quantize(x, scale, zero_point, quantizer.scheme))
    quantizer.compute_scales()
    assert quantizer.scale is None and not quantizer.state_dict()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_dynamic", [None, True, False])
def test_casts_need_no_scale(dtype, is_dynamic):
    quantizer = TensorQuantizer(QuantizationSpec(dtype=dtype, is_dynamic=is_dynamic))
    assert not quantizer.needs_data and not quantizer.is_dynamic
    x = torch.randn(64)
    assert same(quantizer(x), x.to(getattr(torch, dtype)).float())
    quantizer.compute_scales()
    assert same(quantizer(x), x.to(getattr(torch, dtype)).float())
    assert isinstance(quantizer.observer, PlaceholderObserver)


def test_disabled_passes_everything():
    quantizer = make()
    quantizer.enabled = False
    x = torch.randn(4)
    assert quantizer(x) is x
    quantizer.is_observing = True
    assert quantizer(x) is x and quantizer.observer.is_empty


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("observing", [True, False])
def test_empty_tensors_pass(is_dynamic, observing):
    quantizer = make(is_dynamic=is_dynamic)
    quantizer.is_observing = observing
    x = torch.empty(0, 8)
    assert quantizer(x) is x


@pytest.mark.parametrize("kind", TYPES, ids=str)
@each_spec
def test_bake_is_forward_in_place(name, kind):
    x = torch.randn(4, 32).to(kind)
    quantizer = observe(make(name), x)
    quantizer.compute_scales()
    expected, start = quantizer(x), x.data_ptr()
    assert quantizer.freeze_(x) is x and x.data_ptr() == start
    assert same(x, expected)


@each_spec
def test_state_is_scale_and_zero_point(name):
    quantizer = make(name)
    assert not quantizer.state_dict() and not list(quantizer.parameters())
    observe(quantizer, torch.randn(4, 32)).compute_scales()
    kept = {"scale"} if "fp8" in name else {"scale", "zero_point"}
    assert set(quantizer.state_dict()) == kept


def test_a_copy_is_independent():
    quantizer = make()
    observe(quantizer, torch.ones(4)).compute_scales()
    other = copy.deepcopy(quantizer)
    other.scale.fill_(9.0)
    observe(other, torch.full((4,), 5.0))
    assert quantizer.scale.item() == pytest.approx(1 / 127.5)
    assert quantizer.observer.hi.item() == 1.0


def test_the_observer_is_that_of_the_specification():
    assert type(make("uint4 per group").observer) is PerGroupMinMaxObserver


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("int8 per tensor", {}, "int8, per_tensor"),
        ("int4 per channel", {"is_dynamic": True}, "int4, per_channel, dynamic"),
        ("uint4 per group", {}, "uint4, per_group, group_size=16"),
    ],
)
def test_repr(name, options, expected):
    assert repr(make(name, **options)) == f"TensorQuantizer({expected})"


def test_repr_of_a_cast():
    spec = QuantizationSpec(dtype="bfloat16", is_dynamic=True)
    assert repr(TensorQuantizer(spec)) == "TensorQuantizer(bfloat16)"


def test_state_knows_its_scheme():
    spec = QuantizationSpec(**SPECS["uint4 per group"])
    assert QuantizedTensor(spec, None, None, None).scheme == spec.scheme
