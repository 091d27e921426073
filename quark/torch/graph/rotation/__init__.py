"""The residual stream and value heads, which can be rotated without changing the model."""
