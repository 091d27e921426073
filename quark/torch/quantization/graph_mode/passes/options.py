"""Options of the passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassOptions:
    """Rewrites that are applied only if they are asked for.

    Attributes:
        hard_activations: Whether SiLU and GELU become piecewise polynomials. This changes the
            function of the model.
        largest_pool: Largest number of elements that a pooling window may have; larger ones are
            split in two. None for no limit.
        channel_caps: Whether ReLU6 becomes ReLU and a cap for each channel, which cross-layer
            equalization can rescale.

    Raises:
        ValueError: ``largest_pool`` is less than 2.
    """

    hard_activations: bool = False
    largest_pool: int | None = None
    channel_caps: bool = False

    def __post_init__(self) -> None:
        if self.largest_pool is not None and self.largest_pool < 2:
            raise ValueError(
                f"largest_pool must be at least 2, or None for no limit, got {self.largest_pool}."
            )
