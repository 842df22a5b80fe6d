"""Masks that hold arrays: their base, and any mask as arrays of intervals."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from a2d_mpi.masks.intervals import EVERYTHING, Interval, overlap
from a2d_mpi.masks.mask import Mask

Integers = Any  # a list or an array of integers; masks hold arrays


class ArrayMask(Mask):
    """Base of frozen dataclasses that hold arrays: masks with the same contents are equal."""

    varying = True

    @cached_property
    def _key(self) -> tuple:
        """Type and contents of the mask, with a shape and a digest for each array."""
        values = (getattr(self, x.name) for x in fields(self))
        return type(self), *(
            (x.shape, hashlib.sha256(x).digest()) if isinstance(x, np.ndarray) else x
            for x in values
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _set(self, **arrays: np.ndarray) -> None:
        """Set attributes to arrays, and make these read-only."""
        for name, given in arrays.items():
            array = np.ascontiguousarray(given)
            array.setflags(write=False)
            object.__setattr__(self, name, array)


@dataclass(frozen=True, eq=False)
class IntervalMask(ArrayMask):
    """Any mask, as arrays of the intervals that each query sees.

    Parameters
    ----------
    begin, end : (seqlen,) or (m, seqlen) integers
        Query ``i`` sees the keys ``begin[i] <= j < end[i]``, and none if ``end[i] <= begin[i]``.
        With m rows, query i sees the keys of m intervals, which must not overlap.  Every rank
        passes the arrays of all tokens (16 bytes per token and interval).

    Raises
    ------
    ValueError
        If the arrays are not integers of one of these shapes, or intervals of a query overlap.
    """

    begin: Integers
    end: Integers

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            array = np.array(getattr(self, name))
            if (
                array.ndim not in (1, 2)
                or array.shape[:-1] == (0,)
                or array.dtype.kind not in "iu"
            ):
                raise ValueError(
                    f"IntervalMask: {name} must be a (seqlen,) or (m, seqlen) integer array, "
                    f"got shape {array.shape} of {array.dtype}"
                )
            array = array.clip(max=EVERYTHING).astype(np.int64)  # uint64 holds larger numbers
            self._set(**{name: array})
        if self.begin.shape != self.end.shape:
            shapes = self.begin.shape, self.end.shape
            raise ValueError(
                "IntervalMask: begin and end must have one shape, got {} and {}".format(*shapes)
            )
        if self.begin.ndim == 2 and (shared := overlap(self.begin, self.end)):
            raise ValueError(f"IntervalMask: {shared[0]} of query {shared[1]} overlap")

    def __repr__(self) -> str:
        return f"IntervalMask({' x '.join(map(str, self.begin.shape))} intervals)"

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        rows = self.begin.shape[-1]
        if rows != seqlen:
            raise ValueError(
                f"IntervalMask has intervals of {rows} queries, but the sequence has {seqlen}"
            )
        return self

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        both = (np.atleast_2d(x)[:, q_tokens] for x in (self.begin, self.end))
        return tuple(zip(*both))
