"""The GPU of each rank, and MPI's support of device memory."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import TYPE_CHECKING

from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.core.config import TRANSFERS

if TYPE_CHECKING:
    from a2d_mpi.devices.cuda import Cuda


def bind_gpu(comm: MPI.Intracomm) -> tuple[Cuda, int]:
    """Make a GPU current in this process: its number is the rank on the node modulo the GPUs.

    Several ranks may share a GPU.  Collective over `comm`.

    Returns
    -------
    device : Cuda
    sharing : int
        The largest number of ranks on one GPU of this node.

    Raises
    ------
    ValueError
        On all ranks, if any rank sees no GPU or has no CuPy.
    """
    call, gpus = Call(comm), 0
    with call.checks(ImportError):
        from a2d_mpi.devices.cuda import Cuda, cupy
    call.agree()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = node.rank, node.size
    node.Free()
    with call.checks(cupy.cuda.runtime.CUDARuntimeError, "CUDA finds no GPU: {}".format):
        gpus = cupy.cuda.runtime.getDeviceCount()
    if not gpus:
        call.problem = call.problem or "CUDA finds no GPU"
    call.agree()
    cupy.cuda.Device(rank % gpus).use()
    return Cuda.current(), -(-size // gpus)


def gpu_aware(transfers: str = "auto") -> tuple[bool, str]:
    """Return True if MPI may be given device memory, and the origin of this answer.

    Parameters
    ----------
    transfers : {"auto", "device", "host"}
        The caller's choice.  "auto" takes the environment variable A2D_MPI_TRANSFERS if it is set,
        and otherwise MPI's own answer.  MPI may deny CUDA support that it has through a plugin
        (UCX).

    Returns
    -------
    aware : bool
    origin : str
        Source of the answer, for users.

    Raises
    ------
    ValueError
        If the argument or the variable has a value that is not in `TRANSFERS`.
    """
    origin = "argument"
    if transfers == "auto":
        origin, transfers = "A2D_MPI_TRANSFERS", os.environ.get("A2D_MPI_TRANSFERS", "auto")
    if transfers not in TRANSFERS:
        raise ValueError(
            f"transfers must be one of {TRANSFERS}, got {transfers!r} (from {origin})"
        )
    if transfers != "auto":
        return transfers == "device", origin
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray MPICH
        return True, "MPICH_GPU_SUPPORT_ENABLED"
    return _answer_of_mpi()


@cache
def _answer_of_mpi() -> tuple[bool, str]:
    """Return MPI's own answer; it is cached, because every call of a plan needs it."""
    for library in _mpi_libraries():
        if query := getattr(library, "MPIX_GPU_query_support", None):  # MPICH
            answer = ctypes.c_int(0)
            if query(0, ctypes.byref(answer)) == 0 and answer.value:  # 0: MPIX_GPU_SUPPORT_CUDA
                return True, "MPIX_GPU_query_support"
        # Open MPI, and MPICH.
        if (query := getattr(library, "MPIX_Query_cuda_support", None)) and query():
            return True, "MPIX_Query_cuda_support"
    return False, "MPI does not say that it is CUDA-aware"


def _mpi_libraries() -> list[ctypes.CDLL]:
    """Open the MPI libraries of this process by their files: mpi4py may hide their symbols."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
        return [ctypes.CDLL(path) for path in sorted(paths)]
    except (OSError, IndexError):
        return []
