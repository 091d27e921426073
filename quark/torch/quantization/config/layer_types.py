"""Types of modules that configurations select."""

from __future__ import annotations

from torch import nn

# Module types that a file may name. Names from files are looked up here only.
LAYER_TYPES: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose2d,
        nn.Embedding,
        nn.EmbeddingBag,
    )
}
# Module types that a global configuration skips. They are quantized if a type or name selects them.
NAMED_ONLY = {nn.Conv1d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag}
