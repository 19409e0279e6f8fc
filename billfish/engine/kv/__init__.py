"""The KV cache: pages, formats, and what a calibration finds of K and V."""
