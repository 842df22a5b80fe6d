"""Ranks: what they agree on, how they are arranged, and how tensors travel between them."""
