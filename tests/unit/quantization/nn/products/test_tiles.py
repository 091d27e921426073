"""Weights in the order of oneDNN: where numbers stand, products, and what takes their place."""

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.native import compilation
from quark.torch.numerics.native.vectors import FEATURE
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.nn.products import fast_type, native, tiles
from quark.torch.quantization.nn.products.arrangement import Arrangement
from quark.torch.quantization.nn.products.panels import Panels
from tests.unit.quantization.nn.products.test_panels import weight

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Tiles for small weights, in memory of their own, on machines that have them."""
    if not compilation.has_feature(FEATURE):
        pytest.skip("numba has no vector instructions for this machine")
    monkeypatch.setattr(tiles, "_KEPT", tiles._Kept())
    if tiles.take_tiles(64, 64) is None:
        pytest.skip("torch has no weights in this order on this machine")
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(fast_type, "_multiplies_bfloat16_fast", lambda: True)


def packed(outputs, inputs, group, half, zeros):
    """An int4 weight in columns, its values in bfloat16."""
    state = weight(Dtype.uint4, False)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // group) + 0.5
    points = torch.randint(0, 16, scale.shape) if zeros else None
    state.spec.scheme.__dict__["group"] = group
    state = state._replace(codes=codes, scale=scale, zero_point=points)
    values = dequantize(codes, scale, points, state.scheme).bfloat16()
    to = Arrangement.of_columns(outputs, inputs, group, half)
    return *Panels.pack(state, to), values


def test_an_order_in_which_single_numbers_are_known():
    """Two tiles: outputs 0 to 63, then 64 to 127; pairs of inputs; outputs; the two of a pair."""
    known = torch.arange(128)[:, None] + 0.25 * torch.arange(4)
    numbers = torch.from_numpy(tiles.in_tiles(known.bfloat16())).view(torch.bfloat16)
    assert numbers.shape == (2, 2, 128)
    for output, inputs in [(0, 0), (0, 1), (0, 3), (5, 2), (63, 1), (64, 0), (100, 3)]:
        found = numbers[output // 64, inputs // 2, 2 * (output % 64) + inputs % 2]
        assert found == known[output, inputs].bfloat16()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize(("outputs", "chunk"), [(64, 1 << 23), (200, 1 << 23), (200, 64 * 64)])
def test_products_are_those_of_the_values(outputs, chunk, half, zeros, monkeypatch):
    """In one piece and in several, with outputs that do not fill a tile."""
    monkeypatch.setitem(native._CHUNKS, torch.bfloat16, chunk)
    panels, parts, values = packed(outputs, 64, 32, half, zeros)
    eye = torch.eye(64).bfloat16()
    for x in (eye, eye.T.repeat(2, 1)[::2], torch.randn(9, 64).bfloat16()):
        y = native.NativeProduct(panels, parts).multiply(x)[:, :outputs]
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), x.double() @ values.double().T, rtol=0.01, atol=0.05)
    assert tiles._KEPT.shapes
    assert torch.equal(native.NativeProduct(panels, parts).multiply(eye)[:, :outputs], values.T)


def test_threads_write_parts_of_the_tiles(monkeypatch):
    monkeypatch.setattr(compilation, "_PIECE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    panels, parts, values = packed(320, 64, 32, 32, True)
    y = native.NativeProduct(panels, parts).multiply(torch.eye(64).bfloat16())
    assert torch.equal(y[:, :320], values.T)


def test_another_weight_of_the_shape_takes_the_same_memory():
    for _ in range(3):
        panels, parts, values = packed(64, 64, 32, 32, False)
        y = native.NativeProduct(panels, parts).multiply(torch.eye(64).bfloat16())
        assert torch.equal(y, values.T)
    assert len(tiles._KEPT.shapes) == 1


def test_the_memory_that_is_kept_is_bounded(monkeypatch):
    """Shapes that are in use stay, and panels multiply others; those without use for long go."""
    monkeypatch.setattr(tiles, "_MOST", 3 * 64 * 64 * 2)
    monkeypatch.setattr(tiles, "_LONG", 4)
    first = tiles.take_tiles(64, 64)
    assert tiles.take_tiles(128, 64).weight.shape == (128, 64)
    panels, parts, values = packed(192, 64, 32, 32, False)
    y = native.NativeProduct(panels, parts).multiply(torch.eye(64).bfloat16())
    assert torch.equal(y[:, :192], values.T)
    assert list(tiles._KEPT.shapes) == [(64, 64), (128, 64)]
    for _ in range(4):
        assert tiles.take_tiles(64, 64) is first
    assert tiles.take_tiles(128, 128) is None
    assert tiles.take_tiles(65, 64).weight.shape == (65, 64)
    assert list(tiles._KEPT.shapes) == [(64, 64), (65, 64)]


def reversed_tiles(weight, in_tiles=tiles.in_tiles):
    return in_tiles(weight)[..., ::-1]


@pytest.mark.parametrize(("name", "other"), [("in_tiles", reversed_tiles), ("PAIR", 4)])
def test_where_the_order_or_size_is_another_panels_multiply(name, other, monkeypatch, caplog):
    monkeypatch.setattr(tiles, "_KEPT", tiles._Kept())
    monkeypatch.setattr(tiles, name, other)
    caplog.set_level("INFO")
    panels, parts, values = packed(64, 64, 32, 32, True)
    y = native.NativeProduct(panels, parts).multiply(torch.eye(64).bfloat16())
    assert torch.equal(y, values.T)
    assert tiles._KEPT.shapes == {(64, 64): None}
    assert "not multiplied in the order of oneDNN" in caplog.text


def test_without_onednn_there_are_none():
    with torch.backends.mkldnn.flags(enabled=False):
        assert tiles.take_tiles(64, 64) is None
    assert tiles.take_tiles(64, 40) is None  # inputs that are filled up
