"""Kernel, generation and serving benchmarks."""
