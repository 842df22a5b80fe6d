"""Arrays of a whole sequence on one rank, and their shards on all ranks."""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.calls import Caller
from a2d_mpi.core.sizes import whole_number
from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array
from a2d_mpi.sharding.distribution import Distribution

ROWS = "for the rows of other ranks"


def scatter(plan: Caller, shards: Distribution, x: Array | None, root: int) -> Array:
    """Do the work of `AttentionPlan.scatter` for the rows of a distribution."""
    comm = plan.grid.comm
    with plan.grid.call("scatter", plan) as call:
        with call.checks():
            whole_number("root", root, 0, comm.size - 1)
            if comm.rank == root:
                _check_rows(x, shards.seqlen, "the sequence")
        call.agree({"root": root, "tokens": shards.seqlen})
        described = packed = None
        if comm.rank == root:
            device = device_of(x)
            packed = device.download(x)[_order(shards)]  # (seqlen, ...), shard after shard
            described = packed.shape[1:], packed.dtype, device is HOST
        with call.watch.waiting(ROWS):
            shape, dtype, host = comm.bcast(described, int(root))
            own = np.empty((shards.counts[comm.rank], *shape), dtype)
            row = _row_of(own)
            sent = None if packed is None else [_bytes(packed), shards.counts, None, row]
            comm.Scatterv(sent, [_bytes(own), len(own), row], int(root))
        row.Free()
        if host:
            return own
        from a2d_mpi.devices.cuda import Cuda

        return Cuda.current().upload(own)


def gather(plan: Caller, shards: Distribution, x: Array, root: int) -> Array | None:
    """Do the work of `AttentionPlan.gather` for the rows of a distribution."""
    comm, same = plan.grid.comm, {"root": root, "tokens": shards.seqlen}
    with plan.grid.call("gather", plan) as call:
        with call.checks():
            whole_number("root", root, 0, comm.size - 1)
            _check_rows(x, shards.counts[comm.rank], "this shard")
            same |= {"dtype": x.dtype, "shape of a row": x.shape[1:], "array": type(x)}
        call.agree(same)
        device = device_of(x)
        own = np.ascontiguousarray(device.download(x))
        packed, received, row = None, None, _row_of(own)
        if comm.rank == root:
            packed = np.empty((shards.seqlen, *own.shape[1:]), own.dtype)
            received = [_bytes(packed), shards.counts, None, row]
        with call.watch.waiting(ROWS):
            comm.Gatherv([_bytes(own), len(own), row], received, int(root))
        row.Free()
        if packed is None:
            return None
        sequence = np.empty_like(packed)
        sequence[_order(shards)] = packed
        return device.upload(sequence)


def _check_rows(x: Array, rows: int, what: str) -> None:
    """Refuse anything but a numeric array with this number of rows."""
    device_of(x)
    if x.dtype.hasobject:
        raise ValueError(f"x has dtype {x.dtype}: objects cannot be sent")
    if x.shape[:1] != (rows,):
        raise ValueError(
            f"x has shape {x.shape} and dtype {x.dtype}, but {what} has {rows} tokens and needs a "
            "row for each"
        )


def _row_of(x: np.ndarray) -> MPI.Datatype:
    """Make MPI's type of a row of an array; the caller frees it."""
    return MPI.BYTE.Create_contiguous(x.dtype.itemsize * math.prod(x.shape[1:])).Commit()


def _order(shards: Distribution) -> np.ndarray:
    """Return the tokens of all shards, one shard after the other, (seqlen,) int64."""
    return np.concatenate([shards.tokens(rank) for rank in range(shards.nshards)])


def _bytes(x: np.ndarray) -> np.ndarray:
    """Return the memory of a C-contiguous array of any dtype as bytes, for MPI."""
    return x.reshape(-1).view(np.uint8)
