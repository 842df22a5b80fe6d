"""Threads of BLAS and OpenMP in the kernels on the host: as many as a rank has cores.

Without a limit, the library of every rank starts a thread for each core of the node.  Then the
ranks of a node slow each other down tenfold.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import ThreadpoolController

from a2d_mpi.core.sizes import whole_number

# If the user has set one of these variables, the number of threads is not changed.
VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
)


class BlasThreads:
    """A limit on the threads of the BLAS libraries and of OpenMP (oneDNN) in this process.

    Parameters
    ----------
    threads : int or None
        Number of threads.  None: the number in the user's environment, or else `cores`.
    cores : int
        Cores of this rank.

    Raises
    ------
    ValueError
        If `threads` is neither None nor a positive integer.
    """

    def __init__(self, threads: int | None, cores: int) -> None:
        if threads is not None:
            whole_number("threads", threads)
        elif not any(os.environ.get(x) for x in VARIABLES):
            threads = cores
        self._threads = threads
        self._libraries: ThreadpoolController | None = None

    def limited(self) -> AbstractContextManager:
        """Limit the threads inside the context; restore the caller's number afterwards."""
        if self._threads is None:
            return nullcontext()
        # Not before, because a kernel loads its library when it is made.
        self._libraries = self._libraries or ThreadpoolController()
        return self._libraries.limit(limits=self._threads)
