"""`quark inspect`: what is in a checkpoint, and the structure of a model."""
