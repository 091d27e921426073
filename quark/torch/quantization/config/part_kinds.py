"""Kinds of parts of a model. It imports nothing heavy, so that listing the names costs nothing.

=============  ====================================================================================
kind           modules
=============  ====================================================================================
``tower``      models of images or audio inside of a model that generates text
``projector``  layers between a tower and the language model
``router``     layers that weigh the experts of a mixture, and the gate of a shared expert
=============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quark.torch.quantization.config.name_lookup import one_of

PARTS = ("tower", "projector", "router")


def check_parts(kinds: Iterable[Any]) -> list[str]:
    """Return kinds of parts as ``PARTS`` spells them.

    Raises:
        TypeError: A kind is no text.
        ValueError: A kind is unknown; the message names the nearest.
    """
    return [one_of(kind, PARTS, "float_parts") for kind in kinds]
