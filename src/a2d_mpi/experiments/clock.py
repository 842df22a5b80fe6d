"""A clock for calibration: all ranks at once, and a look at whether others disturb them."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.tile import Tile
from a2d_mpi.experiments.timing import seconds_of
from a2d_mpi.kernels import make_kernel
from a2d_mpi.masks.mask import Full
from a2d_mpi.planning.calibration import Sample


class Clock:
    """Times what all ranks do at once, and looks whether others disturb.

    Parameters
    ----------
    comm : Intracomm
    share : float
        Of a core, for each rank.
    patience : float
        Seconds of a look.

    Attributes
    ----------
    shares, seconds : list of float
        Of all looks; see `a2d_mpi.planning.calibration.disturbance`.
    """

    def __init__(self, comm: MPI.Intracomm, share: float, patience: float) -> None:
        self.comm, self.share, self.patience = comm, share, patience
        self.shares: list[float] = []
        self.seconds: list[float] = []
        self._call = kernel_calls("float32", (256, 256, 1, 1, 64, Full()))[0]["forward"]
        self.look()

    def look(self) -> None:
        """All ranks compute for a while: do they get their cores, and how fast are these?"""
        self.comm.Barrier()
        start, cpu, calls, wall = time.perf_counter(), time.process_time(), 0, 0.0
        while wall < self.patience:
            self._call()
            calls, wall = calls + 1, time.perf_counter() - start
        here = np.array([time.process_time() - cpu, wall, calls])
        cpu, wall, calls = self.comm.allreduce(here)
        self.shares.append(min(1.0, cpu / wall / self.share))
        self.seconds.append(wall / calls)

    def mean(self, action: Callable[[], object]) -> float:
        """Seconds of `action`, the mean over the ranks."""
        return seconds_of(action, self.comm, operator.add) / self.comm.size

    def step(self, steps: Callable[[int], object], few: int, many: int) -> float:
        """Seconds of one step among others; ``steps(n)`` takes n of them, one after the other.

        Not of the first ones: a link that was idle may let these pass at once.
        """
        mean = self.mean
        found = [mean(lambda: steps(many)) - mean(lambda: steps(few)) for _ in range(3)]
        return max(float(np.median(found)) / (many - few), 1e-9)

    def until(self, seconds: float) -> Callable[[], bool]:
        """A function that tells all ranks alike whether there is time left."""
        end = time.perf_counter() + seconds
        return lambda: self.comm.bcast(time.perf_counter() < end)


def kernel_calls(
    dtype: str, shape: tuple, poll: Callable | None = None, name: str = "auto"
) -> tuple[dict[str, Callable], Sample]:
    """The calls of the kernel of that name by phase, and a sample of them without seconds."""
    nq, nk, *heads, mask = shape
    tile = Tile(*shape, dtype)
    kernel = make_kernel(name, HOST, tile.q.dtype, tile.softmax_scale, poll)
    tile.forward(kernel)
    calls = {
        "forward": lambda: tile.forward(kernel),
        "backward": lambda: tile.backward(kernel),
    }
    cut = 0 if isinstance(mask, Full) else nq - 1
    return calls, Sample(tile.area, nq, nk, cut, tuple(heads), 0.0)
