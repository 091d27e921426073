"""Evaluation: how much of a model's quality is left after quantization."""
