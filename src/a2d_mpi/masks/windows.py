"""Masks by position: windows, prefixes, global tokens and block-causal masks.

The visible keys of a query follow from its position among the keys.  So these masks can be aligned
with keys of another length, and applied inside documents (`a2d_mpi.masks.documents`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from a2d_mpi.core.sizes import whole_number
from a2d_mpi.masks.intervals import EVERYTHING, Interval
from a2d_mpi.masks.mask import Mask


@dataclass(frozen=True)
class _Positional(Mask):
    """Base of masks that are given by a few integers."""

    positional = True
    _least = 0

    def __post_init__(self) -> None:
        for x in fields(self):
            name, given = f"{type(self).__name__}: {x.name}", getattr(self, x.name)
            value = min(whole_number(name, given, self._least), EVERYTHING >> 2)
            object.__setattr__(self, x.name, value)


@dataclass(frozen=True)
class SlidingWindow(_Positional):
    """A query sees the keys near its own position, as with FlashAttention's ``window_size``.

    Parameters
    ----------
    left, right : int
        Query i sees the keys ``i - left <= j <= i + right``, at most ``left + right + 1`` keys.
        The default of `right`, 0, makes the window causal.

    Raises
    ------
    ValueError
        If a number is not an integer or is negative.
    """

    left: int
    right: int = 0

    default_distribution = "contiguous"  # all rows cost the same, and near keys are often local

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        q = np.asarray(q_tokens, np.int64)
        return ((np.maximum(q - self.left, 0), q + (self.right + 1)),)


@dataclass(frozen=True)
class GlobalSlidingWindow(_Positional):
    """A sliding window and global tokens: the first tokens see all keys and are seen by all.

    Parameters
    ----------
    tokens : int
        Number of global tokens.
    left, right : int
        The window of the other tokens, as in `SlidingWindow`.

    Raises
    ------
    ValueError
        As in `SlidingWindow`.
    """

    tokens: int
    left: int
    right: int = 0

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        q = np.asarray(q_tokens, np.int64)
        everywhere = (q >= 0) & (q < self.tokens)
        begin = np.maximum(q - self.left, self.tokens)
        end = np.where(everywhere, EVERYTHING, q + (self.right + 1))
        return (np.zeros_like(q), np.full_like(q, self.tokens)), (begin, end)


@dataclass(frozen=True)
class PrefixLM(_Positional):
    """A query sees the whole prefix, and itself and the keys before it.

    Parameters
    ----------
    prefix : int
        Number of prefix tokens, which all see each other.

    Raises
    ------
    ValueError
        As in `SlidingWindow`.
    """

    prefix: int

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        q = np.asarray(q_tokens, np.int64)
        return ((np.zeros_like(q), np.maximum(q + 1, self.prefix)),)


@dataclass(frozen=True)
class BlockCausal(_Positional):
    """A query sees all keys of its own block of tokens and of the blocks before it.

    Parameters
    ----------
    block : int
        Number of tokens of a block.

    Raises
    ------
    ValueError
        If `block` is not a positive integer.
    """

    block: int

    _least = 1

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        q = np.asarray(q_tokens, np.int64)
        return ((np.zeros_like(q), (q // self.block + 1) * self.block),)
