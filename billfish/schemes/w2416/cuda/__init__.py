"""w2416 on an NVIDIA GPU: records, tile configurations, kernels."""
