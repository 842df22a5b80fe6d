"""Seconds of calls, one after the other in turn: the one loop of all measurements, without MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from a2d_mpi.devices.host import HOST

if TYPE_CHECKING:
    from mpi4py import MPI

    from a2d_mpi.devices.protocol import Device

T = TypeVar("T")


def turns(items: Sequence[T], trials: int) -> Iterator[T]:
    """All items, once a trial; each trial begins with the next, so none always follows another."""
    for trial in range(trials):
        first = trial % len(items)
        yield from [*items[first:], *items[:first]]


def seconds_of(
    action: Callable[[], object],
    comm: MPI.Intracomm | None = None,
    over: Callable[[float, float], float] = max,
    device: Device = HOST,
) -> float:
    """Seconds of one call that all ranks make at once.

    Parameters
    ----------
    action : callable
    comm : Intracomm, optional
        Of the ranks.  Default: this process is alone.
    over : callable
        Reduction over the ranks; by default the slowest one counts.
    device : Device
        The time ends when all that is queued there is done.
    """
    device.seconds(device.mark(), device.mark())  # waits for what was queued before
    if comm is not None:
        comm.Barrier()
    start = time.perf_counter()
    action()
    device.seconds(device.mark(), device.mark())
    taken = time.perf_counter() - start
    return taken if comm is None else comm.allreduce(taken, over)


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    trials: int,
    comm: MPI.Intracomm | None = None,
    warmup: int = 1,
    device: Device = HOST,
) -> dict[str, np.ndarray]:
    """Seconds of each call on the slowest rank, (trials,), after `warmup` trials more."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(list(calls), warmup + trials):
        seconds[name].append(seconds_of(calls[name], comm, device=device))
    return {name: np.array(x[warmup:]) for name, x in seconds.items()}
