"""Runs data through a model block by block, and algorithms over the blocks."""
