"""Values near the largest of a type stay finite in every scheme, and in what is exported of it."""

import pytest
import torch

from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.quantizer import TensorQuantizer

FRACTIONS = (1.0, 0.999, 0.996, 0.99, 0.97, 0.93, 0.9, 0.8, 0.76, 0.6, 0.51)
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def specs():
    """Every specification in a scheme, once."""
    unique = {}
    for name in scheme_names():
        for tensor, spec in scheme(name).specs():
            unique.setdefault(repr(spec), (spec.for_parameter() if tensor in PARAMETERS else spec))
    return list(unique.values())


def extremes(dtype):
    """Rows of one sign and of both, of every fraction of the largest value, (rows, 128)."""
    most = torch.finfo(dtype).max * torch.tensor(FRACTIONS, dtype=torch.float64)
    rows = most.unsqueeze(1).expand(-1, 128).clone()
    mixed = rows.clone()
    mixed[:, ::2] *= -1
    mixed[:, ::3] *= 0.5
    return torch.stack([rows, -rows, mixed], 1).to(dtype).unsqueeze(2)  # (fractions, 3, 1, 128)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.sampled(4)
def test_every_scheme(dtype):
    for spec in specs():
        for x in extremes(dtype).flatten(0, 1):
            quantizer = TensorQuantizer(spec)
            if not spec.is_dynamic or spec.needs_data:
                quantizer.observer(x)
                quantizer.compute_scales(x)
            y = quantizer(x)
            assert y.dtype is dtype and bool(y.isfinite().all()), (spec, x[0, :2])
            # Saturation takes half of the largest values at most, unless scales are narrow.
            stored, large = spec.scheme.scale, x.abs() > 0.9 * x.abs().max()
            is_wide = stored.stored_dtype is not torch.float16 or dtype is torch.float16
            if spec.fmt.scaled and (stored.fmt is None or stored.two_level) and is_wide:
                assert bool((y / x)[large].gt(0.45).all()), (spec, x[0, :2])
            if not spec.is_dynamic and quantizer.scheme.fmt.scaled:
                exported = quantizer.quantized_tensor(x, False).value(torch.float32)
                assert bool(exported.to(dtype).isfinite().all()), (spec, x[0, :2])
