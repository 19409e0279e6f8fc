"""Measurements: generation now, kernels and serving when they exist."""
