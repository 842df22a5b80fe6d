"""Distributions of the tokens over the ranks, and the visible pairs between their shards."""
