"""Makes a few-bit model: calibrates, quantizes, writes. No inference code imports this package."""
