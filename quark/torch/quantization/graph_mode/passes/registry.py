"""The literal list of passes."""

from __future__ import annotations

from quark.torch.quantization.graph_mode.passes.activations import MAKE_CAPS, MAKE_HARD
from quark.torch.quantization.graph_mode.passes.batch_norm import (
    FOLD_INTO_LAYER_BEFORE,
    FOLD_INTO_LAYERS_BEHIND,
    MAKE_DEPTHWISE,
)
from quark.torch.quantization.graph_mode.passes.constants import COMPUTE_CONSTANTS
from quark.torch.quantization.graph_mode.passes.dropout import REMOVE_DROPOUT
from quark.torch.quantization.graph_mode.passes.in_place import MAKE_FUNCTIONAL
from quark.torch.quantization.graph_mode.passes.pooling import POOL_MEANS, SPLIT_LARGE_POOLS
from quark.torch.quantization.graph_mode.passes.rewriting import Pass

# Applied in this order: what separates a layer from its batch norm is removed before the batch norm
# is folded, and a batch norm between two layers is folded into the first one.
PASSES: tuple[Pass, ...] = (
    MAKE_FUNCTIONAL,
    REMOVE_DROPOUT,
    COMPUTE_CONSTANTS,
    FOLD_INTO_LAYER_BEFORE,
    FOLD_INTO_LAYERS_BEHIND,
    MAKE_DEPTHWISE,
    POOL_MEANS,
    # those that an option asks for
    MAKE_HARD,
    SPLIT_LARGE_POOLS,
    MAKE_CAPS,
)
