"""Rotations that spread outliers: QuaRot and SpinQuant."""
