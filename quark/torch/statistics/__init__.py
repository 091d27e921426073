"""Statistics of a float model and its data, collected once for any number of quantizations."""
