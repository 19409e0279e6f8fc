"""The OpenAI-compatible HTTP server. Nothing here yet."""
