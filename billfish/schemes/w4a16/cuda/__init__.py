"""w4a16 on an NVIDIA GPU: records, tile configurations, kernels."""
