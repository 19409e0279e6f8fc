"""Measurements: kernels, generation and serving."""
