"""Modules with quantized tensors."""
