"""Quantization of exported graphs: layers, edges and the passes before them."""
