"""Recipes: a scheme with its best algorithms, by name."""

from __future__ import annotations

from typing import Any

from quark.torch.quantization.config.algo import AlgoConfig
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.name_lookup import one_of

_AWQ = {"name": "awq"}
_YAQA = {"name": "yaqa", "choose_damping": True, "random_tokens": 0.5}
_DAMPED_YAQA = _YAQA | {"output_damp_percent": 1.0}
_SMOOTH = {"name": "smooth", "alpha": 0.5}
_STRONG_SMOOTH = {"name": "smooth", "alpha": 0.7, "random_tokens": 0.5}
_BLOCKS = {
    **{"name": "rotation", "r1": False, "rotation_size": 32},
    "online_config": {"online_rotation_layers": ["*"]},
}
_SEARCHED_SMOOTH = {"name": "autosmoothquant", "random_tokens": 0.5}
_R1R2R4 = {"name": "rotation", "r1": True, "r2": True, "r4": True}

# Name -> (scheme, options of algorithms in order). A client must rotate inputs to run what a recipe
# made whose name ends in "_rotated". Reasons: docs/mixed-precision.md. A check fails if
# benchmarks/three_texts.json has a better row.
RECIPES: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "w8": ("int8_wo", (_DAMPED_YAQA,)),
    "w4": ("int4_wo_signed_128", (_AWQ, _YAQA)),
    "w3": ("int3_wo_signed_128", (_DAMPED_YAQA,)),
    "w2": ("w_int2_per_group_asym", (_DAMPED_YAQA,)),
    "w8a8": ("w_int8_per_channel_a_int8_per_tensor_sym", (_STRONG_SMOOTH,)),
    "w8a8_rotated": ("w_int8_per_channel_a_int8_per_tensor_sym", (_STRONG_SMOOTH, _R1R2R4)),
    "w8a8_dynamic": ("ptpc_int8", (_SEARCHED_SMOOTH, _DAMPED_YAQA)),
    "w4a4": ("int4_wa_signed_128", (_AWQ, _YAQA)),
    "w4a4_rotated": ("int4_wa_signed_128", (_SMOOTH, _BLOCKS, _YAQA)),
    "fp8": ("ptpc_fp8", (_DAMPED_YAQA,)),
    "mxfp4": ("mxfp4", (_AWQ, _YAQA)),
    "mxfp4_rotated": ("mxfp4", (_SMOOTH, _BLOCKS, _YAQA)),
    "nvfp4": ("nvfp4", (_AWQ, _YAQA)),
}


def recipe(name: str) -> tuple[str, list[AlgoConfig]]:
    """Return the name of the scheme of a recipe, and the options of its algorithms in order.

    Raises:
        ValueError: No recipe has that name; the message names the nearest.
    """
    scheme, algorithms = RECIPES[one_of(name, RECIPES, "recipe")]
    return scheme, [algo_config_from_dict(options) for options in algorithms]
