"""Products of fp8 codes of inputs and weights on GPUs that multiply fp8.

These are ``torch._scaled_mm``, with one scale for a tensor or one for each row. They are used after
a sample has shown that the device computes them right. Some GPUs of AMD (gfx94x) have fp8 without a
negative zero ("fnuz"), whose codes stand for half of the values. There, codes are held in that
format, and the places of negative zeros beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import triton_inputs
from quark.torch.quantization.nn.products.arrangement import Arrangement, Parts
from quark.torch.quantization.nn.products.method import Method, Use
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.quantizer import QuantizedTensor

logger = logging.getLogger(__name__)

_ALIGNED = 16  # kernels take numbers of inputs and outputs that are multiples of it
_FORMAT = Dtype.fp8_e4m3.value
_CODES, _HALVED = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_NEGATIVE_ZERO = 0x80
_SAMPLE, _SAMPLE_ROWS = 64, (1, 17)
_TOLERANCE = 2.0**-7  # of the largest output; bfloat16 alone is off by 2^-9
_TYPES = (torch.bfloat16, torch.float16)  # kernels do not keep all bits of float32


@dataclass(frozen=True)
class ScaledMethod(Method):
    """A kernel that multiplies fp8 codes; it quantizes inputs itself.

    Parts are the ``codes`` (outputs, inputs) in the type of the device and the ``scale``, float32
    (outputs, 1) or (1, 1); also ``input_scale`` of static inputs, and ``negative_zeros``, the
    places of codes that the device does not have.

    Attributes:
        panels: Order and format of the codes, a row as a panel.
        inputs: How inputs are quantized.
        dtype: Type of the results.
    """

    inputs: Scheme
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name of the product; see ``describe_runtime``."""
        return "fp8"

    @property
    def quantizes_inputs(self) -> bool:
        """Whether it takes inputs that are not quantized yet."""
        return True

    def multiply_rows(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs), quantized, and the codes, (rows, outputs)."""
        if not len(x):
            return x.new_empty(0, self.panels.arrangement.outputs)
        codes, scale = self._quantize(x, parts.get("input_scale"))
        codes = to_device_codes(codes, parts["codes"].dtype)
        return scaled_product(codes, parts["codes"], scale, parts["scale"], self.dtype)

    def _quantize(
        self, x: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of ``x`` (rows, inputs), given the scale of static inputs."""
        in_one_pass = triton_inputs.quantize(x, scale, self.inputs)
        if in_one_pass is not None:
            return in_one_pass
        if scale is None:
            scale, _ = qdq.dynamic_qparams(x, self.inputs)
        return qdq.quantize(x, scale, None, self.inputs), scale

    def decode(self, parts: Parts) -> torch.Tensor:
        """Return the values of the codes in float32, (outputs, inputs), in their order."""
        return self.codes(parts).float() * parts["scale"]

    def codes(self, parts: Parts) -> torch.Tensor:
        """Return the codes of the weight, (outputs, inputs), in their order."""
        codes = parts["codes"]
        if codes.dtype == _HALVED:
            bits = codes.view(torch.uint8).flatten()
            bits = bits.index_fill(0, parts["negative_zeros"], _NEGATIVE_ZERO)
            codes = bits.view(codes.shape).view(_CODES)
        return codes


def to_device_codes(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return e4m3 codes in the type of a device; "fnuz" has the same bits for half of a value.

    Negative zeros become zeros there, and NaN becomes NaN.
    """
    return codes if codes.dtype == dtype else (codes.float() * 0.5).to(dtype)


def scaled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the product of codes of a device, scaled.

    Args:
        x: Codes (rows, inputs).
        weight: Codes (outputs, inputs), of the same type.
        x_scale: One scale, or one for each row, any shape.
        weight_scale: One scale, or one for each output, any shape.
        dtype: Type of the result.
    """
    a, b = (scale.float().reshape(-1, 1) for scale in (x_scale, weight_scale))
    if x.dtype == _HALVED:
        a, b = a * 2.0, b * 2.0
    if a.numel() > 1 or b.numel() > 1:  # kernels take scales for the rows of both, or of none
        a, b = a.expand(len(x), 1).contiguous(), b.expand(len(weight), 1).contiguous()
    y: torch.Tensor = torch._scaled_mm(x, weight.T, a, b.T, out_dtype=dtype)
    return y


def scaled_methods(
    state: QuantizedTensor, group: int, use: Use
) -> Iterator[tuple[ScaledMethod, Parts]]:
    """Iterate over the fp8 method for a weight and its tensors, if the device has one for it.

    Args:
        state: Codes (outputs, inputs) and scales.
        group: Number of inputs that share a scale.
        use: How the layer uses its product.
    """
    codes, scale, inputs = state.codes, state.scale, use.inputs
    if codes is None or scale is None or inputs is None or use.dtype not in _TYPES:
        return
    outputs, columns = codes.shape
    fits = codes.dtype == _CODES and group == columns and scale.numel() in (1, outputs)
    is_aligned = columns % _ALIGNED == 0 and outputs % _ALIGNED == 0
    if not (fits and is_aligned and takes_inputs(inputs, use.input_scale)):
        return
    has_rows = inputs.per_token or scale.numel() > 1
    dtype = device_type(codes.device)
    if not is_proved(codes.device, dtype, use.dtype, has_rows):
        return
    parts = {"codes": to_device_codes(codes, dtype), "scale": scale.float().reshape(-1, 1)}
    if use.input_scale is not None:
        parts["input_scale"] = use.input_scale.float().reshape(())
    if dtype == _HALVED:
        bits = codes.view(torch.uint8).flatten()
        parts["negative_zeros"] = (bits == _NEGATIVE_ZERO).nonzero().flatten()
    to = Arrangement.of_single_rows(outputs, columns, group)
    yield ScaledMethod(Panels(state.scheme.fmt, to, 0, 0), inputs, use.dtype), parts


def takes_inputs(scheme: Scheme, scale: torch.Tensor | None) -> bool:
    """Whether inputs have fp8 codes, with one scale for a tensor or dynamic ones for the rows."""
    if scheme.fmt != _FORMAT or scheme.scale.two_level:
        return False
    is_static = scale is not None and scale.numel() == 1
    is_dynamic = scale is None
    is_whole = scheme.qscheme is QSchemeType.per_tensor and not scheme.per_token
    return (is_static and is_whole) or (is_dynamic and (is_whole or scheme.per_token))


def device_type(device: torch.device) -> torch.dtype:
    """Return the type of e4m3 codes that a device multiplies."""
    if device.type != "cuda" or torch.version.hip is None:
        return _CODES
    name = str(torch.cuda.get_device_properties(device).gcnArchName)
    return _HALVED if name.startswith("gfx94") else _CODES


@lru_cache(maxsize=64)
def is_proved(device: torch.device, codes: torch.dtype, dtype: torch.dtype, has_rows: bool) -> bool:
    """Whether a device multiplies samples of codes right.

    The first answer is kept for this process; a refusal is logged.

    Args:
        device: The device.
        codes: Type of the codes.
        dtype: Type of the results.
        has_rows: Whether rows have scales.
    """
    try:
        errors = [_error(device, codes, dtype, n) for n in ((1, _SAMPLE) if has_rows else (1,))]
        problem = "" if max(errors) <= _TOLERANCE else f"the error of a sample is {max(errors):.2g}"
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        # Older versions of torch lack the function; devices refuse in these ways.
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    if problem:
        logger.info("Products of fp8 codes are not used on %s: %s.", device, problem)
    return not problem


def _error(device: torch.device, codes: torch.dtype, dtype: torch.dtype, scales: int) -> float:
    """Return the largest error of products of a sample, in units of its largest output."""
    random = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(_SAMPLE, _SAMPLE, generator=random, dtype=torch.float32, device="cpu") * 100
        for _ in range(2)
    )
    x[0], weight[0] = _FORMAT.max_value, -_FORMAT.max_value  # largest sums
    x, weight = x.to(_CODES), weight.to(_CODES)
    a, b = (
        torch.rand(scales, 1, generator=random, dtype=torch.float32, device="cpu") * 0.01 + 0.01
        for _ in range(2)
    )
    expected = (x.double() @ weight.double().T) * a * b.T
    on_device = [to_device_codes(t.to(device), codes) for t in (x, weight)]
    errors = []
    for rows in _SAMPLE_ROWS:
        given = a[:rows].to(device), b.to(device)
        y = scaled_product(on_device[0][:rows], on_device[1], *given, dtype).cpu().double()
        errors.append((y - expected[:rows]).abs().max() / expected[:rows].abs().max())
    return float(torch.stack(errors).max())
