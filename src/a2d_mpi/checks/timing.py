"""Benchmarks: timing in turn, and a table of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.checks.check import Check
from a2d_mpi.cli.options import FAILED_CHECK, aligned
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.layout import Layout
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.kernels.protocol import Kernel
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning.choice import Choice

T = TypeVar("T")


def report(
    comm: MPI.Intracomm, rows: Sequence[Sequence[str]], checks: Mapping[str, Mapping[str, Check]]
) -> int:
    """Print a table and the failed checks of each of its runs; return the exit code.

    Collective; the arguments of rank 0 count.
    """
    failed = [
        f"FAILED {run}, {name}: error {x.error:.2e}, bound {x.bound:.2e}"
        for run, of_run in checks.items()
        for name, x in of_run.items()
        if not x.passed
    ]
    if comm.rank == 0:
        print(aligned(rows, left=(0,)))
        print("\n".join(failed) or "all checks passed", flush=True)
    return comm.bcast(FAILED_CHECK if failed else 0)


def turns(items: Sequence[T], trials: int) -> Iterator[T]:
    """Yield all items once in each trial; each trial begins one item later than the one before.

    So no item always follows the same other item.
    """
    for trial in range(trials):
        first = trial % len(items)
        yield from [*items[first:], *items[:first]]


def seconds_of(
    action: Callable[[], object],
    comm: MPI.Intracomm = MPI.COMM_SELF,
    over: Callable[[float, float], float] = max,
    device: Device = HOST,
) -> float:
    """Time one call that all ranks make together; return its seconds.

    Parameters
    ----------
    action : callable
    comm : Intracomm
        Communicator of the ranks.  Default: this process is alone.
    over : callable
        Reduction of the seconds over the ranks.  Default: the slowest rank.
    device : Device
        The time ends when all work that is queued on this device is done.
    """
    device.seconds(device.mark(), device.mark())  # waits for work that was queued before
    comm.Barrier()
    start = time.perf_counter()
    action()
    device.seconds(device.mark(), device.mark())
    taken = time.perf_counter() - start
    return comm.allreduce(taken, over)


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    trials: int,
    comm: MPI.Intracomm = MPI.COMM_SELF,
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


def plan_of(
    comm: MPI.Intracomm,
    choice: Choice,
    grids: dict[Layout, ProcessGrid],
    **options: object,
) -> AttentionPlan:
    """Make a plan; plans of one layout share a grid in `grids`.

    `options` are options of `a2d_mpi.attention.methods.make_plan`.
    """
    layout, work = choice.layout, choice.work
    if layout not in grids:
        grids[layout] = ProcessGrid.from_layout(comm, layout)
    options = {**work.arguments, "overlap": work.overlap, **options}
    return make_plan(choice.method, grids[layout], work.mask, **options)


def kernel_calls(
    kernel: Kernel, mask: Mask, t: dict[str, Array], device: Device = HOST
) -> dict[str, Callable[[], None]]:
    """Return the calls of a kernel by phase; "backward" needs the results of "forward".

    Parameters
    ----------
    kernel : Kernel
    mask : Mask
        Of queries and keys whose tokens begin at 0.
    t : dict of str to arrays
        q, k, v and dout, each (tokens, heads, headdim), to which new arrays for the results are
        added: out, lse, dq, dk, dv.
    device : Device
    """
    q, k, v, dout = (t[name] for name in ("q", "k", "v", "dout"))
    seen = mask.intervals(np.arange(len(q)), np.arange(len(k)))
    out, dq, dk, dv = (device.empty(x.shape, x.dtype) for x in (q, q, k, v))
    lse = device.empty(q.shape[:2], compute_dtype(q.dtype))
    t |= {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def forward() -> None:
        kernel.forward(q, k, v, seen, out, lse)

    def backward() -> None:  # with delta, which autograd computes in its backward pass, too
        delta = device.delta(dout, out)
        kernel.backward(dout, q, k, v, lse, delta, seen, dq, dk, dv, fresh=True)

    return {"forward": forward, "backward": backward}
