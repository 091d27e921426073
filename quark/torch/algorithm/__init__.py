"""Algorithms that change a model so that less is lost when it is quantized."""
