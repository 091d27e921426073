"""Containers: the kinds of files that hold a quantized model, one file each."""
