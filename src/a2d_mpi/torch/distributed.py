"""The process group of torch.distributed on the ranks of an MPI communicator."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call

PATIENCE = timedelta(seconds=60)  # until a rank has reached the store of rank 0


def init_process_group(comm: MPI.Intracomm, backend: str | None = None) -> None:
    """Set up torch.distributed on the ranks of an MPI communicator.  Collective over `comm`.

    Rank r of `comm` is rank r of ``torch.distributed.group.WORLD``.  No environment variables are
    needed: rank 0 opens a store on a free port, and MPI tells the others where.

    Parameters
    ----------
    comm : Intracomm
    backend : str, optional
        As of ``torch.distributed.init_process_group``.  Default: gloo for tensors on the CPU, and
        NCCL for CUDA tensors if there are GPUs.  Each rank first sets its own GPU.

    Raises
    ------
    ValueError
        On all ranks, if torch.distributed is set up already or cannot be set up on any rank, or
        ranks have different backends.
    """
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    call, store = Call(comm), None
    names = comm.allgather(socket.gethostname())
    host = names[0] if len(set(names)) > 1 else "localhost"
    with call.checks():
        if dist.is_initialized():
            raise ValueError("torch.distributed is initialized already")
        if comm.rank == 0:
            store = dist.TCPStore(host, 0, comm.size, True, PATIENCE, wait_for_workers=False)
    call.agree({"backend": backend})
    port = comm.bcast(store and store.port)
    with call.checks():
        store = store or dist.TCPStore(host, port, comm.size, False, PATIENCE)
    call.agree()
    with call.checks():
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    call.agree()
