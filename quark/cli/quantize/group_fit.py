"""Group sizes of flags of ``quark quantize`` that divide the weights of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quark.cli.console import wrong

if TYPE_CHECKING:
    from torch import nn

    from quark.cli.quantize.request import Request
    from quark.torch.quantization.config.config import Config

logger = logging.getLogger(__name__)


def fit_groups(request: Request, config: Config, outline: nn.Module | None) -> Config:
    """Return the configuration with groups, super-blocks and rotations that divide the layers.

    Layers that super-blocks do not divide take another scheme. A recipe names no size of groups and
    rotations, so smaller ones may take their place. The new schemes and sizes are printed.

    Args:
        request: The flags.
        config: The configuration.
        outline: The model on the meta device, or None.
    """
    from quark.torch.quantization.group_fit import (
        common_group_size,
        fit_group_sizes,
        fit_rotation_size,
        fit_super_blocks,
    )

    if outline is None:
        return config
    config, schemes = fit_super_blocks(outline, config)
    for name in sorted(set(schemes.values())):
        patterns = [pattern for pattern, chosen in schemes.items() if chosen == name]
        logger.warning(
            "Super-blocks of 256 inputs do not divide %s: the scheme is %s there.",
            ", ".join(patterns),
            name,
        )
    fitting, sizes = fit_group_sizes(outline, config)
    if request.recipe is None:
        if sizes:
            _check_groups(request, sizes, common_group_size(outline, config))
        return config
    config = fitting
    for size in sorted(set(sizes.values()), reverse=True):
        patterns = [pattern for pattern, chosen in sizes.items() if chosen == size]
        logger.warning(
            "The groups of the recipe do not divide %s: the group size is %d there.",
            ", ".join(patterns),
            size,
        )
    config, rotated = fit_rotation_size(outline, config)
    if rotated is not None:
        logger.warning(
            "The rotations of the recipe do not divide the inputs of all layers: they rotate %d "
            "inputs at a time.",
            rotated,
        )
    return config


def _check_groups(request: Request, sizes: Mapping[str, int], common: int | None) -> None:
    """Refuse a scheme whose groups do not divide the weights of a model.

    Args:
        request: The flags.
        sizes: Group sizes that fit, for layers whose weights the groups do not divide.
        common: Group size that fits all layers, or None.

    Raises:
        typer.BadParameter: The message names a scheme that fits.
    """
    from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES

    scheme = request.quant_scheme
    if scheme is None or scheme in BLOCK_SCHEMES:  # those have one size of blocks
        return
    name, _, given = scheme.rpartition("_")
    flag, groups, own = f"--group_size {common}", "its groups", "--group_size_per_layer '{}' {}"
    if given.isdecimal():
        flag, groups = f"--quant_scheme {name}_{common}", f"groups of {given}"
        own = f"--layer_quant_scheme '{{}}' {name}_{{}}"
    each = [own.format(pattern, size) for pattern, size in sizes.items()]
    advice = f"Give {flag}, or other groups to such layers alone: {each[0]}"
    if common is None:
        advice = f"No size of groups divides all. Give each kind its own: {' '.join(each)}"
    more = f" and of {len(sizes) - 1} more kinds of layers" if len(sizes) > 1 else ""
    raise wrong(
        "--quant_scheme",
        f"{groups} do not divide the inputs of {next(iter(sizes))}{more}. {advice}",
    )
