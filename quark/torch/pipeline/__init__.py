"""Data that runs through a model block by block, and the statistics that it leaves."""
