"""Checkpoints of safetensors: files, names, `config.json`, and the way to and from a model."""
