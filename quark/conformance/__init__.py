"""Numbers of this package compared with those of other software."""
