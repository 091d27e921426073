"""Checkpoint formats: one file each, and a line in the table of ``formats.base``."""
