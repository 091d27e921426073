"""Layouts: how the tensors of a quantized layer are packed and named in a checkpoint."""
