"""Algorithms that choose codes: GPTQ, AWQ, clipping search. No inference code imports them."""
