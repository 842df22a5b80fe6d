"""Timing of calls in turn: the loop of all measurements; no MPI import."""

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
    """Yield all items once in each trial; each trial begins one item later than the one before.

    So no item always follows the same other item.
    """
    for trial in range(trials):
        first = trial % len(items)
        yield from [*items[first:], *items[:first]]


def seconds_of(
    action: Callable[[], object],
    comm: MPI.Intracomm | None = None,
    over: Callable[[float, float], float] = max,
    device: Device = HOST,
) -> float:
    """Time one call that all ranks make together; return its seconds.

    Parameters
    ----------
    action : callable
    comm : Intracomm, optional
        Communicator of the ranks.  Default: this process is alone.
    over : callable
        Reduction of the seconds over the ranks.  Default: the slowest rank.
    device : Device
        The time ends when all work that is queued on this device is done.
    """
    device.seconds(device.mark(), device.mark())  # waits for work that was queued before
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
    """Time calls in turn; return seconds of each on the slowest rank, (trials,).

    `warmup` further trials come first and are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(list(calls), warmup + trials):
        seconds[name].append(seconds_of(calls[name], comm, device=device))
    return {name: np.array(x[warmup:]) for name, x in seconds.items()}
