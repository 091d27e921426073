"""The structure of a model, discovered by running it; no architecture is known by name."""
