"""Observers: statistics of the tensors that pass by."""
