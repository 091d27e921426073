"""Quantization of exported graphs: rewriting, layers, edges."""
