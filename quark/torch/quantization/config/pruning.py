"""Options of the algorithms that prune: how many weights become zero, and which may."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quark.torch.quantization.config.algo_base import BlockAlgoConfig
from quark.torch.quantization.config.bounds import Count, Fraction, InnerFraction

UNSTRUCTURED = "unstructured"


@dataclass
class PruningConfig(BlockAlgoConfig):
    """Base class of the options of algorithms that set weights to zero before others are rounded.

    Attributes:
        mask_structure: ``N:M`` keeps N weights of each M adjacent inputs of a row, such as ``2:4``.
            ``unstructured`` sets the fraction ``sparsity`` to zero, wherever it matters least.
        sparsity: Fraction of the weights that become zero, between 0 and 1. None: that of the
            structure; 0.5 for ``unstructured``.
        inside_layer_modules: Names of the layers of a block to prune. Empty: all quantized layers.
        model_decoder_layers: Name of the list of decoder blocks. Empty: discovered.

    Raises:
        ValueError: ``mask_structure`` is neither of both, ``sparsity`` is not between 0 and 1, or
            it contradicts the structure.
    """

    mask_structure: str = "2:4"
    sparsity: InnerFraction | None = None
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        structure, name = self.mask_structure, type(self).__name__
        if structure != UNSTRUCTURED:
            numbers = re.fullmatch(r"(\d{1,4}):(\d{1,4})", structure, re.ASCII)
            if numbers is None or not 0 < int(numbers[1]) < int(numbers[2]):
                raise ValueError(
                    f"{name}: mask_structure must be {UNSTRUCTURED!r} or 'N:M' with 0 < N < M, "
                    f"such as '2:4', got {structure!r}."
                )
        if self.sparsity is None:
            return
        if structure != UNSTRUCTURED and self.sparsity != self.fraction:
            raise ValueError(
                f"{name}: mask_structure={structure!r} sets {self.fraction:g} of the weights to "
                f"zero, but sparsity={self.sparsity} is given. Leave sparsity out, or set "
                f"mask_structure={UNSTRUCTURED!r}."
            )

    @property
    def group(self) -> tuple[int, int] | None:
        """N and M of ``N:M``; None for ``unstructured``."""
        if self.mask_structure == UNSTRUCTURED:
            return None
        kept, size = self.mask_structure.split(":")
        return int(kept), int(size)

    @property
    def fraction(self) -> float:
        """Fraction of the weights that become zero."""
        if self.group is not None:
            return 1 - self.group[0] / self.group[1]
        return 0.5 if self.sparsity is None else self.sparsity


@dataclass
class SparseGPTConfig(PruningConfig):
    """Options of SparseGPT (Frantar and Alistarh 2023): later columns compensate for the zeros.

    Attributes:
        damp_percent: Damping of the Hessian, as a fraction of its mean diagonal.
        block_size: Columns whose zeros are chosen together under ``unstructured``.
    """

    name: str = "sparsegpt"
    damp_percent: Fraction = 0.01
    block_size: Count = 128


@dataclass
class WandaConfig(PruningConfig):
    """Options of Wanda (Sun et al. 2024): zeros by magnitudes of weights times those of inputs."""

    name: str = "wanda"
