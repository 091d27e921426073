"""Specifications of weights that several formats can hold."""

from quark.torch.quantization.config.spec import QuantizationSpec


def per_group(dtype, symmetric=True):
    """Weights in groups of 32 under scales in float16."""
    return QuantizationSpec(
        dtype,
        qscheme="per_group",
        ch_axis=-1,
        group_size=32,
        symmetric=symmetric,
        is_dynamic=False,
        scale_type="float16",
    )
