"""Products in torch for vLLM on a CPU, which has no kernels for most formats, or inexact ones.

``replace`` puts them into the tables that vLLM chooses kernels from. All else stays vLLM's: what it
makes of a configuration, names, loading, joining of layers, unpacking, attention. The kernels of
0.32 for CPUs know no float32, no fp8 per tensor and no MX, and add up int8 products in 16 bits on
processors without VNNI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp6.base import MxFp6LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import mxfp4_utils
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.platforms.interface import PlatformEnum

FP8_MAX = 448.0
FP4, FP6_E2M3, FP6_E3M2 = (2, 1), (2, 3), (3, 2)  # bits of exponent and of mantissa
MX_BLOCK = 32


def replace() -> None:
    """Make vLLM use these kernels in this process."""
    cpu = PlatformEnum.CPU
    kernels._POSSIBLE_INT8_KERNELS[cpu] = [Int8]
    kernels._POSSIBLE_FP8_KERNELS[cpu] = [Fp8]
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [Fp8Blocks]
    kernels._POSSIBLE_KERNELS[cpu] = [Weights]
    kernels._POSSIBLE_MXFP4_KERNELS[cpu] = [Mxfp4]
    kernels._POSSIBLE_MXFP6_KERNELS[cpu] = [Mxfp6]
    kernels._POSSIBLE_MXFP8_KERNELS[cpu] = [kernels.EmulationMxfp8LinearKernel]
    kernels._POSSIBLE_NVFP4_KERNELS[cpu] = [kernels.EmulationNvFp4LinearKernel]
    ops.scaled_fp8_quant = to_fp8
    QuantFP8.forward_native = inputs_to_fp8
    ops.cpu_attn_reshape_and_cache = nearest_in_cache(ops.cpu_attn_reshape_and_cache)
    ops.hadacore_transform = rotated
    mxfp4_utils.dequant_mxfp4 = lambda codes, scale, dtype: of_mx(codes, scale, FP4).to(dtype)


class Possible:
    """A kernel that takes what it is given."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        """Accept the formats of MXFP4; vLLM 0.33 asks each kernel about them."""
        return True


class Int8(Possible, CPUInt8ScaledMMLinearKernel):
    """int8 weights and activations, static ones with offsets too, added up exactly.

    vLLM divides the largest value of a token by 127; what is documented for Quark, and what
    compressed-tensors does, is 127.5, so that all else can be compared.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        codes = getattr(layer, self.layer_param_names[0]).data.clone()
        self.process_weights_for_onednn(layer)  # joins the scales
        layer.values = codes.double()

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        _, weight_scale, scale, offset, _ = self._get_layer_params(layer)
        offset = 0 if offset is None else offset
        if scale is None:
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127.5  # padding is zeros
        codes = (torch.round(x * (1 / scale)) + offset).clamp(-128, 127)
        sums = F.linear((codes - offset).double(), layer.values)
        y: Tensor = (sums * weight_scale.double().flatten() * scale.double()).to(x.dtype)
        return y if bias is None else y + bias


class Fp8(Possible, FP8ScaledMMLinearKernel):
    """fp8 weights and activations, per tensor or per channel and token."""

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        sums = A.double() @ B.double()
        y = (sums * As.double().reshape(-1, 1) * Bs.double().reshape(1, -1)).to(out_dtype)
        return (y if bias is None else y + bias).view(*output_shape)


class Fp8Blocks(Possible, Fp8BlockScaledMMLinearKernel):
    """fp8 weights in blocks of two axes, and inputs in groups as long as these blocks."""

    def process_weights_after_loading(self, layer: Any) -> None:
        params = self._get_layer_params(layer)
        rows, columns = self.weight_group_shape
        scales = params.block_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        layer.values = params.weight.double() * scales[: len(params.weight)].double()

    def apply_weights(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        groups = x.unflatten(-1, (-1, self.weight_group_shape[1]))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX  # padding is zeros
        values = (groups / scale).to(torch.float8_e4m3fn).double() * scale
        y = F.linear(values.flatten(-2), layer.values).to(x.dtype)
        return y if bias is None else y + bias

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise NotImplementedError("apply_weights computes the product and never calls this")


class Weights(Possible, CPUWNA16LinearKernel):
    """Integer weights in groups, beside activations in float."""

    def _process_gptq_weights_w4a16(self, layer: Any) -> None:
        codes, scales, offsets = self._get_weight_params(layer)
        kind = self.config.weight_type
        unpack, width = keys.unpack_quantized_values_into_int32, kind.size_bits
        integers = unpack(codes.data, kind, 0) if 32 % width == 0 else dense(codes.data, width)
        values = integers.float()  # (inputs, outputs)
        groups = values.reshape(len(scales), -1, values.shape[1])
        offset = unpack(offsets.data, kind, 1)[:, None] if self.config.zero_points else kind.bias
        layer.values = ((groups - offset) * scales.data[:, None]).flatten(0, 1).t().contiguous()

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.values.to(x.dtype), bias)


def rotated(x: Tensor, inplace: bool = True) -> Tensor:
    """Return x, (…, n), times the Sylvester matrix of order n over the root of n."""
    size, parts = x.shape[-1], x.double().unsqueeze(-1)  # (…, n, 1): each step doubles the last
    while parts.shape[-1] < size:
        even, odd = parts[..., ::2, :], parts[..., 1::2, :]
        parts = torch.cat([even + odd, even - odd], -1)
    return (parts.squeeze(-2) / size**0.5).to(x.dtype)


def dense(words: Tensor, width: int) -> Tensor:
    """Return codes, (inputs, outputs), whose bits go on in the next word, (words, outputs)."""
    bits = (words[:, None] >> torch.arange(32)[:, None]) & 1
    return (bits.flatten(0, 1).unflatten(0, (-1, width)) << torch.arange(width)[:, None]).sum(1)


class Mx(Possible):
    """MX weights, beside MX activations or such in float."""

    config: Any

    def weight_format(self) -> tuple[int, int]:
        return FORMATS[self.config.weight_quant_key]

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.values = of_mx(layer.weight.data, layer.weight_scale.data, self.weight_format())

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        key = self.config.activation_quant_key
        if key is not None:
            x = rounded_to_mx(x, FORMATS[key])
        return F.linear(x, layer.values.to(x.dtype), bias)


class Mxfp4(Mx, MxFp4LinearKernel):
    """MXFP4 weights."""

    def weight_format(self) -> tuple[int, int]:
        return FP4


class Mxfp6(Mx, MxFp6LinearKernel):
    """MXFP6 weights."""


FORMATS = {
    keys.kMxfp4Dynamic: FP4,
    keys.kMxfp6E2M3Dynamic: FP6_E2M3,
    keys.kMxfp6E2M3Static: FP6_E2M3,
    keys.kMxfp6E3M2Dynamic: FP6_E3M2,
    keys.kMxfp6E3M2Static: FP6_E3M2,
}


def to_fp8(
    values: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Return codes of fp8_e4m3 and the scale, that of each row of ``values`` or of all."""
    if scale is None:
        amax = (
            values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().max()
        )
        scale = (amax / FP8_MAX).clamp(min=1e-12)  # padding is zeros
    codes = (values / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def inputs_to_fp8(
    quantizer: Any, x: Tensor, scale: Tensor | None = None, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return codes of the inputs of a layer, and their scale.

    vLLM multiplies by the reciprocal of the scale here; what is documented for Quark, and what
    compressed-tensors does, is division, so that all else can be compared.
    """
    return to_fp8(x, scale, use_per_token_if_dynamic=quantizer.use_per_token_if_dynamic)


def nearest_in_cache(store: Callable[..., None]) -> Callable[..., None]:
    """Return what rounds keys and values to the nearest before they are stored in fp8.

    The kernel cuts off what lies between two codes, so that it gets a little more than a code.
    """

    def rounded(values: Tensor, scale: float) -> Tensor:
        codes, _ = to_fp8(values, torch.tensor(scale))
        return codes.to(values.dtype) * (scale * (1 + 1e-6))

    def stored(key: Tensor, value: Tensor, *rest: Any, **options: Any) -> None:
        if options["kv_cache_dtype"] == "fp8":
            key, value = rounded(key, options["k_scale"]), rounded(value, options["v_scale"])
        store(key, value, *rest, **options)

    return stored


def magnitudes(form: tuple[int, int]) -> Tensor:
    """Return the values of the codes without sign, in order."""
    exponent, mantissa = form
    codes = torch.arange(1 << (exponent + mantissa))
    power, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    whole = (power > 0) + fraction / (1 << mantissa)
    return whole * torch.exp2(power.clamp(min=1) - (1 << (exponent - 1)) + 1.0)


def of_mx(packed: Tensor, exponents: Tensor, form: tuple[int, int]) -> Tensor:
    """Return the values of packed codes, (N, K): two in a byte, or four in three bytes."""
    bits = 1 + sum(form)
    per_word = 2 if bits == 4 else 4
    words = packed.view(torch.uint8).long().reshape(packed.shape[0], -1, per_word * bits // 8)
    words = (words << (8 * torch.arange(words.shape[-1]))).sum(-1, keepdim=True)
    codes = (words >> (bits * torch.arange(per_word))) & ((1 << bits) - 1)
    positive = magnitudes(form)
    values = torch.cat([positive, -positive])[codes.flatten(-2)]
    scales = torch.exp2(exponents.view(torch.uint8).float() - 127)
    return values * scales.repeat_interleave(MX_BLOCK, -1)


def rounded_to_mx(x: Tensor, form: tuple[int, int]) -> Tensor:
    """Return ``x`` rounded in blocks, ties to even; the largest value decides about the scale.

    Its mantissa is rounded to that of the format before the exponent is taken.
    """
    blocks = x.reshape(*x.shape[:-1], -1, MX_BLOCK)
    positive = magnitudes(form)
    fraction, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    exponent = exponent + (fraction >= 1 - 0.5 ** (form[1] + 2))
    scale = torch.exp2((exponent - torch.frexp(positive[-1]).exponent).float())
    middles = (positive[1:] + positive[:-1]) / 2
    middles[1::2] = middles[1::2].nextafter(torch.zeros(()))  # from odd codes up
    codes = torch.bucketize((blocks / scale).abs().contiguous(), middles)
    return (positive[codes] * blocks.sign() * scale).flatten(-2)
