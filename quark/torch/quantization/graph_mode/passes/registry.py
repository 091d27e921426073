"""The literal list of passes."""

from __future__ import annotations

from quark.torch.quantization.graph_mode.passes.batch_norm import (
    FOLD_INTO_LAYER_BEFORE,
    FOLD_INTO_LAYERS_BEHIND,
    MAKE_DEPTHWISE,
)
from quark.torch.quantization.graph_mode.passes.rewriting import Pass

# Applied in this order: a batch norm between two layers is folded into the first one.
PASSES: tuple[Pass, ...] = (
    FOLD_INTO_LAYER_BEFORE,
    FOLD_INTO_LAYERS_BEHIND,
    MAKE_DEPTHWISE,
)
