"""Files of a model: reading, judging, writing and translating them."""
