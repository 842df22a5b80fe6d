"""The problem of a program: a config, a mask and the owner of each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.masks.mask import Full, Mask
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.visibility import Visibility, visibility


@dataclass(frozen=True)
class Problem:
    """A config with a mask and the tokens of every rank; traffic depends on nothing else.

    Parameters
    ----------
    config : AttentionConfig
    queries : Distribution
        Owners of the queries by grid rank, before any exchange of heads.  The U ranks of a Ulysses
        group are consecutive.
    mask : Mask
        A mask from `a2d_mpi.masks.mask.Mask.aligned`.
    other_keys : Distribution, optional
        Owners of the keys, if they are not those of the queries (cross-attention).
    """

    config: AttentionConfig
    queries: Distribution
    mask: Mask = field(default_factory=Full)
    other_keys: Distribution | None = None

    @property
    def keys(self) -> Distribution:
        """Owners of the keys."""
        return self.queries if self.other_keys is None else self.other_keys

    @cached_property
    def visibility(self) -> Visibility:
        """Tokens of each shard that other shards require."""
        return visibility(self.mask, self.queries, self.keys)

    def cp_group(self, heads: int) -> Problem:
        """Return the problem of a context-parallel group: all tokens, 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        keys = None if self.other_keys is None else _positions(self.other_keys, heads)
        queries = _positions(self.queries, heads)
        return Problem(self.config.cp_group(heads), queries, self.mask, keys)

    def of(self, owners: range) -> Problem:
        """Return the problem of the ranks `owners`: their tokens, numbered from 0, and no mask."""
        keys = None if self.other_keys is None else self.other_keys.among(owners)
        return Problem(self.config, self.queries.among(owners), other_keys=keys)


_positions = lru_cache(maxsize=64)(Distribution.positions)  # it caches the runs of its shards
