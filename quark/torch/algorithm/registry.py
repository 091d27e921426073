"""The table of algorithms: one line each, loaded on use.

Nothing heavy is imported here, so that the command line can list the names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark.torch.pipeline.context import Algorithm

# Name of the options -> "module:attribute".
ALGORITHMS: dict[str, str] = {
    "smooth": "quark.torch.algorithm.smoothquant:ALGORITHM",
    "autosmoothquant": "quark.torch.algorithm.autosmoothquant:ALGORITHM",
    "awq": "quark.torch.algorithm.awq:ALGORITHM",
    "cle": "quark.torch.algorithm.cle:ALGORITHM",
    "rotation": "quark.torch.algorithm.rotation.rotate:ALGORITHM",
    "quarot": "quark.torch.algorithm.rotation.rotate:ALGORITHM",
    "bias_correction": "quark.torch.algorithm.bias_correction:ALGORITHM",
    "svdquant": "quark.torch.algorithm.svdquant:ALGORITHM",
    "sparsegpt": "quark.torch.algorithm.pruning:ALGORITHM",
    "wanda": "quark.torch.algorithm.pruning:ALGORITHM",
    "gptq": "quark.torch.algorithm.gptq:ALGORITHM",
    "gptaq": "quark.torch.algorithm.qronos:ALGORITHM",
    "qronos": "quark.torch.algorithm.qronos:ALGORITHM",
    "yaqa": "quark.torch.algorithm.yaqa:ALGORITHM",
    "blockwise_joint_tuning": "quark.torch.algorithm.joint_tuning:ALGORITHM",
    "autoround": "quark.torch.algorithm.autoround:ALGORITHM",
}


def load_algorithm(name: str) -> Algorithm:
    """Import the algorithm of an entry of the table."""
    module, _, attribute = ALGORITHMS[name].partition(":")
    algorithm: Algorithm = getattr(import_module(module), attribute)
    return algorithm
