"""Configuration: data only."""
