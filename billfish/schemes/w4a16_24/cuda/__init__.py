"""w4a16_24 on an NVIDIA GPU: records, launches, kernels."""
