"""transformers models with quantized linears: loading, streaming by block, running."""
