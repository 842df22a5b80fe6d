"""Input files.

Every function raises OSError if a file cannot be read or written, and ValueError if its contents
are wrong.  The message is one line that names the file, for the user to read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import h5py
import numpy as np

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.results.hdf5 import reading
from a2d_mpi.sharding.distribution import Distribution

INPUT_SCHEMA = ("a2d_mpi input", 1)


@dataclass(frozen=True)
class InputInfo:
    """The contents of an input file: q, k, v and perhaps dout, the gradient with respect to out.

    Attributes
    ----------
    path : str
    config : AttentionConfig
        Sizes of the tensors.
    has_dout : bool
        Whether the file has dout.
    """

    path: str
    config: AttentionConfig
    has_dout: bool


def inspect_input(path: str | os.PathLike[str]) -> InputInfo:
    """Check everything of an input file except its numbers, which are not read.

    Raises
    ------
    OSError
        If the file is missing, unreadable, not HDF5 or cut short.
    ValueError
        If the schema is wrong, or a dataset is missing or has a wrong type or shape.
    """
    with reading(path, INPUT_SCHEMA) as file:
        names = ["q", "k", "v"] + ["dout"] * ("dout" in file)
        datasets = {name: _dataset(file, name) for name in names}
        shapes = {name: x.shape or () for name, x in datasets.items()}
        dtypes = {name: x.dtype for name, x in datasets.items()}
    for name in names:
        if dtypes[name].kind != "f":
            raise ValueError(f"{path}: {name} must be floating-point numbers, got {dtypes[name]}")
        if len(shapes[name]) != 3:
            raise ValueError(
                f"{path}: {name} must have shape (seqlen, heads, headdim), got {shapes[name]}"
            )
    seqlen, nheads, headdim = shapes["q"]
    try:
        config = AttentionConfig(seqlen, nheads, headdim, shapes["k"][1], headdim_v=shapes["v"][2])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if any(shapes[name] != (seqlen, *config.shape(name)) for name in names):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        need = "q (tokens, nheads, headdim), k and v (tokens, nheads_kv, ...)"
        raise ValueError(f"{path}: shapes do not agree: {listed}; need {need}")
    return InputInfo(os.fspath(path), config, "dout" in names)


def read_shard(
    info: InputInfo, name: str, distribution: Distribution, rank: int, dtype: np.typing.DTypeLike
) -> np.ndarray:
    """Read the rows of one shard of the sequence.  Many processes may read at the same time.

    Parameters
    ----------
    info : InputInfo
        Result of `inspect_input`.
    name : {"q", "k", "v", "dout"}
    distribution : Distribution
        Owners of the first tokens of the file, which has as many or more.
    rank : int
    dtype : dtype
        Dtype of the result.

    Returns
    -------
    (n, heads, headdim) dtype
        A new array; row i is the token ``distribution.tokens(rank)[i]``.

    Raises
    ------
    OSError
        If this rank cannot read the file, or its numbers are damaged.
    """
    rows = np.empty((distribution.counts[rank], *info.config.shape(name)), dtype)
    with reading(info.path, INPUT_SCHEMA) as file:
        data = _dataset(file, name)
        for here, there in distribution.slices(rank):
            rows[here] = data[there]
    return rows


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    data = file.get(name)
    if not isinstance(data, h5py.Dataset):
        raise OSError(f"dataset {name} is missing")
    return data
