"""The devices on which these tests run, and models whose results do not depend on them."""

import pytest
import torch

from tests.device.stand_in import TYPE, register_backend, stand_in


def _device_types():
    """The stand-in, and the accelerator of this machine if it has one."""
    has_accelerator = hasattr(torch, "accelerator") and torch.accelerator.is_available()
    return [TYPE, torch.accelerator.current_accelerator().type] if has_accelerator else [TYPE]


@pytest.fixture(params=_device_types())
def device(request):
    """The device on which a test runs, "standin" or such as "cuda"."""
    if request.param != TYPE:
        yield request.param
        return
    if register_backend is None:
        pytest.skip("this version of torch has no devices written in Python")
    with stand_in():
        yield TYPE


@pytest.fixture
def standin():
    """The stand-in alone, for tests that count or need two devices."""
    if register_backend is None:
        pytest.skip("this version of torch has no devices written in Python")
    with stand_in():
        yield TYPE


@pytest.fixture(scope="session")
def plain(build):
    """Make a small model whose operations are the same on all devices.

    The CPU has fused kernels for attention and for the gradient of SiLU, which round differently.
    So the model has neither, and the stand-in must give the bits of the CPU.
    """

    def plain(name="llama", **changes):
        changes = {"attn_implementation": "eager", "hidden_act": "relu", **changes}
        return build(name, **changes)

    return plain


@pytest.fixture(scope="session")
def assert_close():
    """Compare tensors of a device with those of the CPU: bits on the stand-in, else rounding."""

    def assert_close(actual, expected, device, rtol=1e-4):
        assert actual.keys() == expected.keys()
        for name, x in expected.items():
            y = actual[name]
            assert (y.dtype, y.shape) == (x.dtype, x.shape), name
            if device == TYPE:
                torch.testing.assert_close(
                    y.cpu().double(), x.double(), rtol=0, atol=0, equal_nan=True, msg=name
                )
            else:
                a, b = y.cpu().double(), x.double()
                assert (a - b).norm() <= rtol * b.norm(), name

    return assert_close
