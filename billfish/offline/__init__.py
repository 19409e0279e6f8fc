"""Making a few-bit model: calibrate, quantize, write; nothing that serves a token imports it."""
