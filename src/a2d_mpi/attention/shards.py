"""Arrays of a whole sequence on one rank, and their shards on all ranks."""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.sharding.distribution import Distribution


def check_rows(x: Array, rows: int, what: str) -> None:
    """Refuse anything but a numeric array with this number of rows."""
    try:
        device_of(x)
    except TypeError as error:
        raise ValueError(f"x {error}") from None
    if x.dtype.hasobject:
        raise ValueError(f"x has dtype {x.dtype}: objects cannot be sent")
    if x.shape[:1] != (rows,):
        raise ValueError(
            f"x has shape {x.shape} and dtype {x.dtype}, but {what} has {rows} tokens and needs a "
            "row for each"
        )


def scatter(comm: MPI.Intracomm, shards: Distribution, x: Array | None, root: int) -> Array:
    """Return this rank's rows of `x`, which rank `root` holds; collective over `comm`.

    Parameters
    ----------
    comm : Intracomm
        One rank for each shard.
    shards : Distribution
    x : (shards.seqlen, ...) array or None
        Read on `root` only.
    root : int

    Returns
    -------
    (n, ...) array
        NumPy or CuPy, as `x`.  The rows travel through the host.
    """
    described = packed = None
    if comm.rank == root:
        device = device_of(x)
        packed = device.download(x)[_order(shards)]  # (seqlen, ...), shard after shard
        described = packed.shape[1:], packed.dtype, device is HOST
    shape, dtype, host = comm.bcast(described, root)
    own = np.empty((shards.counts[comm.rank], *shape), dtype)
    row = MPI.BYTE.Create_contiguous(dtype.itemsize * math.prod(shape)).Commit()
    sent = None if packed is None else [_bytes(packed), shards.counts, None, row]
    try:
        comm.Scatterv(sent, [_bytes(own), len(own), row], root)
    finally:
        row.Free()
    return own if host else _gpu().upload(own)


def gather(comm: MPI.Intracomm, shards: Distribution, x: Array, root: int) -> Array | None:
    """Return the rows of all ranks in the order of the sequence on `root`, None on other ranks.

    Collective over `comm`: the opposite of `scatter`, with its parameters.
    """
    device = device_of(x)
    own = np.ascontiguousarray(device.download(x))
    row = MPI.BYTE.Create_contiguous(own.dtype.itemsize * math.prod(own.shape[1:])).Commit()
    packed = received = None
    if comm.rank == root:
        packed = np.empty((shards.seqlen, *own.shape[1:]), own.dtype)
        received = [_bytes(packed), shards.counts, None, row]
    try:
        comm.Gatherv([_bytes(own), len(own), row], received, root)
    finally:
        row.Free()
    if packed is None:
        return None
    sequence = np.empty_like(packed)
    sequence[_order(shards)] = packed
    return device.upload(sequence)


def _order(shards: Distribution) -> np.ndarray:
    """Return the tokens of all shards, one shard after the other, (seqlen,) int64."""
    return np.concatenate([shards.tokens(rank) for rank in range(shards.nshards)])


def _bytes(x: np.ndarray) -> np.ndarray:
    """Return the memory of a C-contiguous array of any dtype as bytes, for MPI."""
    return x.reshape(-1).view(np.uint8)


def _gpu() -> Device:
    from a2d_mpi.devices.cuda import Cuda

    return Cuda.current()
