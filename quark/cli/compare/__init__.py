"""`quark compare`: flags, measurement and tables."""
