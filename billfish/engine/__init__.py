"""Requests -> tokens: continuous batching over a paged KV cache of 16, 8 or 4 bits.

`llm` is the entry point (LLM), `core` one step, `scheduler` what runs in it; `kv` holds the cache
and its pages, `attention` reads it; `sampling` and `text` turn logits into tokens and text; `cuda`
is the same on Hopper.
"""
