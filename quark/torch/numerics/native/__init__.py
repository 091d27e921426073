"""Kernels for CPUs that are compiled when they are first called, beside operations of torch."""
