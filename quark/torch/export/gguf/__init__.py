"""GGUF: models in one file, for llama.cpp."""
