"""The engine on Hopper: its kernels, their tables, CUDA graphs."""
