"""The file of a mask: intervals of every query, or packed documents; no MPI import.

::

    /begin, /end   (seqlen,) or (m, seqlen) integers: of query i the keys [begin[i], end[i]), or of
                   m rows each row has an interval; it is empty where end <= begin
    or
    /cu_seqlens    (documents + 1,) integers: first tokens of packed documents, and the last end
    /              attribute causal, true or false: inside the documents

Attributes schema ("a2d_mpi mask") and schema_version (1) may be there or not.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import member, plain, reading
from a2d_mpi.masks.mask import IntervalMask, Mask
from a2d_mpi.masks.patterns import make_mask

if TYPE_CHECKING:
    from a2d_mpi.masks.documents import Documents

SCHEMA = ("a2d_mpi mask", 1)
FILE = "file:"  # before a path, where masks have texts


@lru_cache(maxsize=32)
def mask_of(text: str, seqlen: int) -> Mask:
    """The mask that a text names: from a file, which is read once, or from `make_mask`.

    Raises
    ------
    OSError, ValueError
        As `read_mask` and `make_mask` raise them.
    """
    if text.startswith(FILE):
        return read_mask(text.removeprefix(FILE), seqlen)
    return make_mask(text, seqlen)


def read_mask(path: str | os.PathLike[str], seqlen: int) -> IntervalMask | Documents:
    """Read the mask of `seqlen` queries and as many keys.

    Any number of processes may, at once.

    Raises
    ------
    OSError
        If the file is missing, unreadable, not HDF5, cut short, or its numbers are elsewhere.
    ValueError
        If datasets are missing, of a wrong type or shape, or do not fit the sequence.
    """
    with reading(path, SCHEMA, needs_schema=False) as file:
        members = {name: member(file, name) for name in ("begin", "end", "cu_seqlens")}
        found = {name: x[()] for name, x in members.items() if isinstance(x, h5py.Dataset)}
        attributes = plain(file.attrs)
    try:
        if list(found) == ["cu_seqlens"]:
            from a2d_mpi.masks.documents import Documents

            mask = Documents(**found, causal=_causal(attributes))
            mask.check(seqlen)
        elif list(found) == ["begin", "end"]:
            mask = IntervalMask(**found)
            mask.check(seqlen)
            _check_range(seqlen, **found)
        else:
            names = " and ".join(found) or "none of them"
            raise ValueError(f"must have datasets begin and end, or cu_seqlens; it has {names}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return mask


def _causal(attributes: dict[str, object]) -> bool:
    """The attribute of that name, a truth value in one of the ways that programs write it."""
    value = attributes.get("causal")
    if value not in (False, True):  # also 0 and 1
        shown = "it has none" if value is None else f"got {value!r}"
        raise ValueError(f"cu_seqlens need the attribute causal, true or false: {shown}")
    return bool(value)


def _check_range(seqlen: int, **arrays: np.ndarray) -> None:
    """Refuse intervals that are not within `seqlen` keys."""
    for name, x in arrays.items():
        wrong = np.argwhere((x < 0) | (x > seqlen))
        if len(wrong):
            place = tuple(wrong[0])
            index = ", ".join(map(str, place))
            raise ValueError(f"{name}[{index}] must be 0 to {seqlen}, got {x[place]}")
