"""Distributions of tokens over ranks, and the visible pairs between their shards."""
