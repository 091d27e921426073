"""Passes over an exported graph, which prepare it for quantization."""
