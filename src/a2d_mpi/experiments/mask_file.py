"""Masks in HDF5 files."""

from __future__ import annotations

import os

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import member, plain, reading
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.documents import Documents

SCHEMA = ("a2d_mpi mask", 1)


def read_mask(path: str | os.PathLike[str], seqlen: int) -> IntervalMask | Documents:
    """Read the mask of `seqlen` queries and keys.  Many processes may read at the same time.

    The file::

        /begin, /end   (seqlen,) or (m, seqlen) integers: query i sees the keys [begin[i], end[i]);
                       with m rows it has m intervals.  An interval is empty if end <= begin.
        or
        /cu_seqlens    (documents + 1,) integers: first token of each packed document, and the end
        /              attribute causal, true or false: whether documents are causal

    The attributes schema ("a2d_mpi mask") and schema_version (1) are optional.

    Raises
    ------
    OSError
        If the file is missing, unreadable, not HDF5 or cut short, or its numbers are elsewhere.
    ValueError
        If datasets are missing, have a wrong type or shape, or do not fit the sequence.
    """
    with reading(path, SCHEMA, needs_schema=False) as file:
        members = {name: member(file, name) for name in ("begin", "end", "cu_seqlens")}
        datasets = {name: x[()] for name, x in members.items() if isinstance(x, h5py.Dataset)}
        attributes = plain(file.attrs)
    try:
        if list(datasets) == ["cu_seqlens"]:
            mask = Documents(**datasets, causal=_causal(attributes))
            mask.check(seqlen)
        elif list(datasets) == ["begin", "end"]:
            mask = IntervalMask(**datasets)
            mask.check(seqlen)
            _check_range(seqlen, **datasets)
        else:
            names = " and ".join(datasets) or "none of them"
            raise ValueError(f"must have datasets begin and end, or cu_seqlens, got {names}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return mask


def _causal(attributes: dict[str, object]) -> bool:
    """Return the attribute "causal"; 0 and 1 count as truth values, too."""
    value = attributes.get("causal")
    if value not in (False, True):
        shown = "got none" if value is None else f"got {value!r}"
        raise ValueError(f"cu_seqlens needs the attribute causal, true or false, {shown}")
    return bool(value)


def _check_range(seqlen: int, **arrays: np.ndarray) -> None:
    """Refuse intervals that reach beyond `seqlen` keys."""
    for name, x in arrays.items():
        wrong = np.argwhere((x < 0) | (x > seqlen))
        if len(wrong):
            place = tuple(wrong[0])
            index = ", ".join(map(str, place))
            raise ValueError(f"{name}[{index}] must be 0 to {seqlen}, got {x[place]}")
