"""Parameters that can be rescaled without changing the function of a model."""
