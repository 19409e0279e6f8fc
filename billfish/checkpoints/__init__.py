"""Model files: reading, validating, writing and converting them."""
