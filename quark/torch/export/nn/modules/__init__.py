"""Layers that hold packed weights, at the import path that other software knows."""

from quark.torch.quantization.nn.operators import QParamsLinear

__all__ = ["QParamsLinear"]
