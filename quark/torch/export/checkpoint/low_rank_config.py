"""The part of the configuration that describes low-rank branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quark.torch.quantization.config.algo import SVDQuantConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.packed import PackedLayer


def with_low_rank(config: Config, ranks: Mapping[str, int]) -> Config:
    """Return a configuration that names the layers with a low-rank branch, as readers need it.

    Args:
        config: Configuration of the model.
        ranks: The rank of each branch, by name of the layer.

    Raises:
        ValueError: The ranks differ, which a configuration cannot tell.
    """
    algorithms = config.algo_config or []
    given = next((a for a in algorithms if isinstance(a, SVDQuantConfig)), None)
    if given is None and not ranks:
        return config
    if len(set(ranks.values())) > 1:
        raise ValueError(f"Low-rank branches have several ranks: {sorted(set(ranks.values()))}.")
    like = given or SVDQuantConfig()
    rank = next(iter(ranks.values()), like.svd_rank)
    written = replace(like, svd_rank=rank, low_rank_layers=list(ranks))
    others = [a for a in algorithms if a is not given]
    place = len(others) if given is None else algorithms.index(given)
    return replace(config, algo_config=[*others[:place], written, *others[place:]])


def declare_low_rank(layer: PackedLayer, name: str, config: Config) -> None:
    """Declare the low-rank branch of a layer with its factors, if the configuration has one."""
    for options in config.algo_config or []:
        if isinstance(options, SVDQuantConfig) and name in (options.low_rank_layers or ()):
            layer.declare_prescale()
            layer.declare_low_rank(options.svd_rank)
