"""Measurements: generation and kernels now, serving when it exists."""
