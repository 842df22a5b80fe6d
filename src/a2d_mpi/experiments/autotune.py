"""Choose a method and a grid by measuring: the planner's first plans run on the real machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.atomic import read_regular, write_whole
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.benchmark import in_turn, random_inputs
from a2d_mpi.experiments.calibrate import measure
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.measure import Measurement, open_device
from a2d_mpi.experiments.options import aligned
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import best_candidates, duration
from a2d_mpi.planning.workload import Workload

CALIBRATION = 5.0  # s to measure a machine of which there is no profile


class Tried(NamedTuple):
    """A plan that was measured.

    Attributes
    ----------
    method : str
    layout : Layout
    predicted, seconds : float
        Of the slowest rank, all phases; `seconds` is the median of the trials, and inf if the plan
        failed.
    problem : str
        Why it failed; empty if it did not.
    """

    method: str
    layout: Layout
    predicted: float
    seconds: float
    problem: str = ""


class Tuned(NamedTuple):
    """The fastest plan; ``print(tuned)`` shows the table.

    Attributes
    ----------
    grid : ProcessGrid
        Plans on it take its distribution and slices by default.
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    table : list of Tried
        All measured plans, fastest first.
    """

    grid: ProcessGrid
    method: str
    table: list[Tried]

    def __str__(self) -> str:
        rows = [("method", "grid", "order", "slices", "distribution", "predicted", "measured")]
        for x in self.table:
            layout, shown = x.layout, x.problem or duration(x.seconds)
            cells = layout.shape, layout.numbering, layout.sliced, layout.distribution or "default"
            rows.append((x.method, *cells, duration(x.predicted), shown))
        return aligned(rows, left=range(5))


def autotune(
    comm: MPI.Intracomm,
    work: Workload,
    machine: Machine | None = None,
    top: int = 3,
    trials: int = 3,
    *,
    methods: Sequence[str] | None = None,
    device: str = "cpu",
    cache: str | os.PathLike[str] | None = None,
    **options: object,
) -> Tuned:
    """Run the planner's first plans on the real machine, and return the fastest on all ranks.

    Each plan is made, called once, timed, and released before the next one.  Collective over
    `comm`.

    Parameters
    ----------
    comm : Intracomm
        Communicator whose ranks fill the nodes one after the other.
    work : Workload
    machine : Machine, optional
        Default: the ranks measure links and kernels on the host for some seconds.
    top, trials : int
        Plans that run, and timed calls of each.
    methods : sequence of str, optional
        Default: all of `a2d_mpi.schedules.METHODS`.
    device : {"cpu", "gpu"}
        Where the plans compute.
    cache : path, optional
        File with the tables of earlier calls, which rank 0 reads and writes.  A call with the same
        arguments on as many ranks takes its answer from there, and measures nothing.
    **options
        Arguments of the plans, such as `kernel`, `transfers` and `threads`.

    Returns
    -------
    Tuned

    Raises
    ------
    ValueError
        On all ranks, if no plan fits, all plans fail, arguments differ between ranks, or the file
        of the cache is no such file.
    """
    arguments = together(comm, lambda: _arguments(comm, work, machine, top, trials))
    arguments |= {"methods": methods, "device": device, **options}
    agree(comm, None, arguments)
    used, key = open_device(comm, device), json.dumps(arguments, default=str)
    table = comm.bcast(together(comm, lambda: _read(cache).get(key), on=0))
    if table is None:
        machine = machine or measure(comm, [work.dtype], CALIBRATION)[0]
        picks = together(
            comm, lambda: best_candidates(machine, comm.size, work, top, methods=methods), on=0
        )
        picks = comm.bcast(picks and [(x.method, x.layout, x.seconds) for x in picks])
        table = [Tried(*x, *_tried(comm, *x[:2], work, trials, used, options)) for x in picks]
        table.sort(key=lambda x: x.seconds)
        if table[0].problem:
            raise CollectiveError(f"no plan runs; the first one fails: {table[0].problem}")
        if cache is not None:
            together(comm, lambda: _write(cache, {**_read(cache), key: table}), on=0)
    return Tuned(ProcessGrid.from_layout(comm, table[0].layout), table[0].method, table)


def _arguments(
    comm: MPI.Intracomm, work: Workload, machine: Machine | None, top: int, trials: int
) -> dict[str, object]:
    """Check the arguments, and return what the answer depends on."""
    if top < 1 or trials < 1:
        raise ValueError(f"top and trials must be at least 1, got {top} and {trials}")
    lengths = work.seqlen, work.seqlen_kv
    return {
        "ranks": comm.size,
        **work.arguments,
        "mask": work.mask.aligned(*lengths).digest(*lengths),
        "backward": work.backward,
        "overlap": work.overlap,
        "machine": machine and machine.name,
        "top": top,
        "trials": trials,
    }


def _tried(
    comm: MPI.Intracomm,
    method: str,
    layout: Layout,
    work: Workload,
    trials: int,
    device: Device,
    options: dict[str, object],
) -> tuple[float, str]:
    """Run a plan; return its seconds, or inf, and why it failed.  The same on all ranks."""
    grid = ProcessGrid.from_layout(comm, layout)
    try:
        plan = make_plan(
            method, grid, work.mask, **work.arguments, overlap=work.overlap, **options
        )
        return _seconds(plan, work.backward, trials, device), ""
    except CollectiveError as error:
        return float("inf"), str(error)
    finally:
        grid.free()


def _seconds(plan: AttentionPlan, backward: bool, trials: int, device: Device) -> float:
    """Return the seconds of the slowest rank in all phases, median of the trials."""
    inputs = together(plan.grid.comm, lambda: random_inputs(plan, backward))
    run = Measurement(plan, inputs, backward, device, checked=False)
    taken = in_turn({"": run.call}, trials, plan.grid.comm, device=device)
    return float(np.median(taken[""]))


def _read(path: str | os.PathLike[str] | None) -> dict[str, list[Tried]]:
    """Read the file of a cache; without a file it is empty."""
    if path is None or not os.path.exists(path):
        return {}
    try:
        found = json.loads(read_regular(path))
        return {key: [_entry(*x) for x in table] for key, table in found.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no cache of autotune: {error}") from None


def _entry(method: str, layout: dict, *others: object) -> Tried:
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in layout.items()}
    return Tried(method, Layout(**values), *others)


def _write(path: str | os.PathLike[str], tables: dict[str, list[Tried]]) -> None:
    write_whole(path, json.dumps(tables, indent=1, default=asdict).encode())
