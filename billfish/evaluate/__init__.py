"""What a model is worth: perplexity, KL from a baseline, zero-shot tasks, and the report."""
