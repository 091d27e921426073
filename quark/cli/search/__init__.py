"""`quark search`: flags, measurement and tables."""
