"""A model's quality: perplexity, KL divergence from a baseline, zero-shot tasks, and the report."""
