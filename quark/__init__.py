"""Quark: post-training quantization of PyTorch models."""

__version__ = "1.0.0.dev0"
