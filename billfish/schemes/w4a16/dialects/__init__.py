"""Public checkpoint formats for w4a16, converted to and from canonical tensors."""
