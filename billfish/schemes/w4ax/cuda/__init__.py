"""w4ax on an NVIDIA GPU: records, launches, kernels."""
