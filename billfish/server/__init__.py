"""HTTP: OpenAI's endpoints over one engine, and a page to try it."""
