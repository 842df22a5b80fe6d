"""Ranks: their agreement, their grid, and the messages in which tensors travel between them."""
