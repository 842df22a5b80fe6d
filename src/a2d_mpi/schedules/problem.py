"""Problems (a config, a mask and the owner of each token), and workloads without owners."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.masks.mask import Full, Mask
from a2d_mpi.schedules.progressions import ranks_among
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.visibility import Visibility, visibility


@dataclass(frozen=True)
class Problem:
    """A config with a mask and the tokens of every rank; traffic depends on nothing else.

    Parameters
    ----------
    config : AttentionConfig
    shards : Distribution
        Shards of the queries by grid rank, before any exchange of heads.  The U ranks of a Ulysses
        group are consecutive.
    mask : Mask
        A mask from `a2d_mpi.masks.mask.Mask.aligned`.
    keys : Distribution, optional
        Shards of the keys, if they belong to another sequence.  Default: `shards`.
    """

    config: AttentionConfig
    shards: Distribution
    mask: Mask = field(default_factory=Full)
    keys: Distribution | None = None

    @property
    def shards_kv(self) -> Distribution:
        """Shards of the keys."""
        return self.shards if self.keys is None else self.keys

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of every rank's shard of queries."""
        return self.shards.counts

    @cached_property
    def counts_kv(self) -> tuple[int, ...]:
        """Number of tokens of every rank's shard of keys."""
        return self.counts if self.keys is None else self.keys.counts

    @cached_property
    def visibility(self) -> Visibility:
        """Tokens of each shard that other shards require."""
        return visibility(self.mask, self.shards, self.shards_kv)

    def tokens_of(self, of_keys: bool, owners: tuple[int, ...]) -> np.ndarray:
        """Return the sorted tokens of several shards; they are cached for all ranks."""
        return _tokens_of(self.shards_kv if of_keys else self.shards, owners)

    def runs_of(self, of_keys: bool, owners: tuple[int, ...]) -> list[range]:
        """Return the tokens of several shards as progressions, shard by shard; cached."""
        return _runs_of(self.shards_kv if of_keys else self.shards, owners)

    def cp_group(self, heads: int) -> Problem:
        """Return the problem of a context-parallel group: all tokens, 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        keys = None if self.keys is None else _of_positions(self.keys, heads)
        shards = _of_positions(self.shards, heads)
        return Problem(self.config.cp_group(heads), shards, self.mask, keys)

    def of(self, owners: range) -> Problem:
        """Return the problem of the ranks `owners`: their tokens, numbered from 0, and no mask."""
        keys = None if self.keys is None else _among(self.keys, owners)
        return Problem(self.config, _among(self.shards, owners), keys=keys)


def _among(shards: Distribution, owners: range) -> Distribution:
    listed = ranks_among([[r for r in shards.runs(p) if r] for p in owners])
    tokens = sum(len(r) for runs in listed for r in runs)
    return Distribution("balanced", tokens, len(owners), listed=tuple(map(tuple, listed)))


@lru_cache(maxsize=64)  # a distribution caches the runs of its shards
def _of_positions(shards: Distribution, heads: int) -> Distribution:
    return shards.positions(heads)


@lru_cache(maxsize=256)
def _runs_of(shards: Distribution, owners: tuple[int, ...]) -> list[range]:
    return [r for p in owners for r in shards.runs(p) if r]


@lru_cache(maxsize=256)
def _tokens_of(shards: Distribution, owners: tuple[int, ...]) -> np.ndarray:
    return np.sort(np.concatenate([shards.tokens(p) for p in owners]))


@dataclass(frozen=True, kw_only=True)
class Workload(AttentionConfig):
    """A config with a mask and the phases to run: the subject of a plan or a prediction.

    Parameters
    ----------
    mask : Mask
    backward : bool
        Whether gradients are computed, too.
    overlap : bool
        Whether to compute while messages travel.
    **others
        As in `AttentionConfig`.
    """

    dtype: str = "bfloat16"
    mask: Mask = field(default_factory=Full)
    backward: bool = False
    overlap: bool = True

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases that are run."""
        return PHASES if self.backward else PHASES[:1]

    @property
    def config(self) -> AttentionConfig:
        """Config without mask and phases."""
        return AttentionConfig(**self.arguments)
