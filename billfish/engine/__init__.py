"""Requests to tokens: continuous batching over a paged KV cache. Nothing here yet."""
