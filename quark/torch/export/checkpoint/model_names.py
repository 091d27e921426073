"""Names that layers of a checkpoint have in the model of Transformers; no model is built.

Patterns of a configuration name layers of the model. Transformers renames tensors of some
architectures when it loads them: ``block_sparse_moe.experts`` of Mixtral becomes ``mlp.experts``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import literal, matches


def renamed_layers(
    described: Mapping[str, Any], layers: Collection[str], config: Config
) -> dict[str, str]:
    """Return the layers that a configuration names as the model does, and not as the files do.

    Transformers, which takes seconds to import, is asked only where patterns have words that may
    be those of other names than the files have.

    Args:
        described: ``config.json``.
        layers: Names of layers in the files.
        config: Configuration of the checkpoint.

    Returns:
        Names in the files -> names in the model.
    """
    by_name = (config.layer_quant_config, config.kv_cache_quant_config, config.query_quant_config)
    patterns = [pattern for field in by_name for pattern in field]
    exact = {literal(name) for name in layers}
    has_words = (any(map(str.isalpha, pattern)) for pattern in patterns if pattern not in exact)
    renamings = list(_renamings(described)) if any(has_words) else []
    if not renamings:
        return {}
    from transformers.core_model_loading import apply_renamings

    found = {}
    for name in layers:
        known = apply_renamings(f"{name}.weight", renamings).removesuffix(".weight")
        if known != name and matches(known, [*config.exclude, *patterns]):
            found[name] = known
    return found


def _renamings(described: Mapping[str, Any]) -> Iterator[Any]:
    """Iterate over the renamings of a model and of the models in it, by class or by type.

    There are none for models with code of their own, and without Transformers.
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return
    if "auto_map" in described:
        return
    parts = [value for value in described.values() if isinstance(value, dict)]
    for part in (described, *parts):
        classes = part.get("architectures")
        names = [*(classes if isinstance(classes, list) else []), part.get("model_type")]
        mappings = (get_checkpoint_conversion_mapping(n) for n in names if isinstance(n, str))
        for transform in next((found for found in mappings if found), ()):
            if isinstance(transform, WeightRenaming):
                yield transform
