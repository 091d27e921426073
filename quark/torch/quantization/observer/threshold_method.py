"""Methods of the first threshold of a trained range, by their documented names."""

from __future__ import annotations

from enum import Enum


class TQTThresholdInitMeth(Enum):
    """Initialization of trained thresholds: ``_3SD`` by moments, ``_KL_J`` by divergence."""

    _3SD = "_3sd"
    _KL_J = "_kl_j"
