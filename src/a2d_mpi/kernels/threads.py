"""BLAS threads of the kernels on the host: as many as a rank has cores.

Without a limit, the BLAS of every rank starts a thread for each core of the node.  Then the ranks
of a node slow each other down tenfold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

# If the user has set one of these variables, the number of threads is not changed.
VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
)


class BlasThreads:
    """A limit on the threads of the BLAS libraries that this process has loaded.

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
        if threads is not None and (not isinstance(threads, (int, np.integer)) or threads < 1):
            raise ValueError(f"threads must be a positive integer, got {threads!r}")
        if threads is None and not any(os.environ.get(x) for x in VARIABLES):
            threads = cores
        self._threads = threads
        self._libraries: list[Any] = []
        if threads is not None:
            libraries = ThreadpoolController().lib_controllers
            self._libraries = [x for x in libraries if x.user_api == "blas"]

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the threads inside the context; restore the caller's number afterwards."""
        before = [(library, library.get_num_threads()) for library in self._libraries]
        for library, number in before:
            if number != self._threads:
                library.set_num_threads(self._threads)
        try:
            yield
        finally:
            for library, number in before:
                if number != self._threads:
                    library.set_num_threads(number)
