"""`drivers/plot.py masks`, and masks in the other programs that need no MPI."""

import numpy as np
import pytest

from a2d_mpi.figures.mask_plots import tiling
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.sharding.choice import CHOICES
from a2d_mpi.sharding.distribution import distribute


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_are_those_of_owners(text):
    """The rank of a pair is in the row of the query's owner and the key's column."""
    mask, tokens, owner = make_mask(text, 60), np.arange(60), np.empty(60, int)
    for name in (None, "striped"):
        found = tiling(text, 60, 2, 3, name)
        assert found.distribution == name if name else found.distribution in CHOICES
        shards = distribute(found.distribution, mask, 60, 2, 3)
        for rank in range(6):
            owner[shards.tokens(rank)] = rank
        ranks = (owner // 3)[:, None] * 3 + (owner % 3)[None, :]
        visible = mask.dense(tokens, tokens)
        assert np.array_equal(found.ranks, np.where(visible, ranks, -1))
        assert found.areas.tolist() == [(found.ranks == rank).sum() for rank in range(6)]
