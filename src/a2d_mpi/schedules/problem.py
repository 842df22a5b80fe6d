"""The problem of a program: a config, a mask and the owner of each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.masks.compiled import CompiledMask
from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.visibility import Visibility


@dataclass(frozen=True)
class Problem:
    """A config with a mask and the tokens of every rank; traffic depends on nothing else.

    Parameters
    ----------
    config : AttentionConfig
    queries, keys : Distribution
        Owners of the queries, and of the keys, by grid rank, before any exchange of heads.  The U
        ranks of a Ulysses group are consecutive.  In self-attention the two are equal.
    seen : CompiledMask, optional
        The mask; None for exchanges of heads, which do not depend on it.
    """

    config: AttentionConfig
    queries: Distribution
    keys: Distribution
    seen: CompiledMask | None = None

    @property
    def mask(self) -> Mask | None:
        """Mask of `seen`, aligned."""
        return self.seen and self.seen.mask

    @cached_property
    def visibility(self) -> Visibility:
        """Tokens of each shard that other shards require."""
        return _visibility(self.seen, self.queries, self.keys)

    def cp_group(self, heads: int) -> Problem:
        """Return the problem of a context-parallel group: all tokens, 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        queries, keys = (x.positions(heads) for x in (self.queries, self.keys))
        return Problem(self.config.cp_group(heads), queries, keys, self.seen)


_visibility = lru_cache(maxsize=8)(Visibility)  # the planner's candidates share it
