"""Number formats and the arithmetic of quantization: pure functions on tensors, torch only."""
