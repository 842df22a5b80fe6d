"""A GPT whose sequence is spread over the ranks.

Every rank holds the activations of its own tokens and a copy of all weights.  Only attention and
the sums of gradients communicate.
"""
