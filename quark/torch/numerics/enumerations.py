"""Rounding modes and types of zero points by their documented names."""

from __future__ import annotations

from enum import Enum


class RoundType(Enum):
    """Rounding mode of values between two codes.

    ``half_even`` rounds to the nearest, ties to the even code; ``round`` rounds to the nearest,
    ties away from zero; ``floor`` rounds towards minus infinity.
    """

    round = 2
    floor = 3
    half_even = 8


class ZeroPointType(Enum):
    """Type of zero points: integers, or floats that keep their fraction."""

    int32 = "int32"
    float32 = "float32"
