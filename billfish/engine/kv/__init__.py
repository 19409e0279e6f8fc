"""The KV cache: pages, formats, codes, and the rotation of K."""
