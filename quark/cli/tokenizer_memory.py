"""Memory that a tokenizer takes, by the size of its file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# In sizes of tokenizer.json, or of the header of a GGUF file.
_KEPT = 8
_LOADING, _LOADING_GGUF = 10, 72  # by Transformers, beside what is kept
_COPYING = 10  # from a GGUF file to another


class TokenizerMemory(NamedTuple):
    """Bytes that the tokenizer of a model takes.

    Attributes:
        kept: While a run goes on.
        loading: While it is loaded, before the model.
        writing: While it is written to a GGUF file.
    """

    kept: int
    loading: int
    writing: int


def tokenizer_memory(source: Path) -> TokenizerMemory:
    """Return the memory of the tokenizer in a directory or GGUF file; zeros if there is none."""
    if not source.is_file():
        file = source / "tokenizer.json"
        size = file.stat().st_size if file.is_file() else 0
        return TokenizerMemory(_KEPT * size, _LOADING * size, _LOADING * size)
    from quark.torch.export.gguf.reader import GgufFile

    size = GgufFile(source).header_bytes
    return TokenizerMemory(_KEPT * size, _LOADING_GGUF * size, _COPYING * size)
