"""Requests -> tokens: continuous batching over a paged KV cache of 16, 8 or 4 bits.

`llm` is the door (LLM), `core` the step, `scheduler` and `pages` who runs and where, `cache` and
`attention` what is kept and read, `sampling` and `text` how a row of logits becomes a text.
"""
