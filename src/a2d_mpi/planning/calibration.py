"""From measured seconds to a machine profile; `drivers/calibrate.py` measures.  No MPI import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.machine import KernelModel, Link, Machine, kernel_terms
from a2d_mpi.planning.model import predict
from a2d_mpi.schedules.problem import Workload

STEADY = 0.2  # a measurement is disturbed if the same calls differ by more


@dataclass(frozen=True)
class Sample:
    """A timed kernel call: visible pairs, queries, keys, queries cut, heads, seconds.

    `heads`: nheads, nheads_kv, headdim, headdim_v.
    """

    area: int
    nq: int
    nk: int
    cut: int
    heads: tuple[int, int, int, int]
    seconds: float


def fit_kernel(samples: Sequence[Sample], backward: bool) -> tuple[KernelModel, float]:
    """The `KernelModel` whose relative errors have the least squares, and the largest of them.

    No constant of a kernel is negative: the constant that comes out most negative is made 0 until
    none does.

    Raises
    ------
    ValueError
        If there are no samples.
    """
    rows = [
        [float(x) for x in kernel_terms(s.area, s.nq, s.nk, s.cut, s.heads, backward)]
        for s in samples
    ]
    if not rows:
        raise ValueError("no kernel was timed")
    relative = np.array(rows) / np.array([[s.seconds] for s in samples])
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    columns = list(range(relative.shape[1]))
    while True:
        chosen = relative[:, columns] / scale[columns]
        found, *_ = np.linalg.lstsq(chosen, np.ones(len(rows)))
        if len(columns) == 1 or (found[0] > 0 and found[1:].min() >= 0):
            break
        del columns[1 + int(found[1:].argmin())]
    worst = float(np.abs(chosen @ found - 1).max())
    values = dict(zip(columns, (found / scale[columns]).tolist()))
    names = [f.name for f in fields(KernelModel)]
    constants = {names[i]: x for i, x in values.items() if i}
    return KernelModel(1 / values[0], **constants), worst


def fit_link(sizes: Sequence[int], seconds: Sequence[float], flood: tuple[int, float]) -> Link:
    """A `Link` from the seconds of exchanges of several sizes, ascending, the first one tiny.

    Parameters
    ----------
    sizes, seconds
        Bytes that every rank sends and receives in one message, and the time.
    flood : (int, float)
        Number of tiny messages posted together, and the time of all.
    """
    number, together = flood
    overhead = max(0.0, (together - seconds[0]) / max(1, number - 1) / 2)
    growth = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    # Noise: a slope that says more than the mean rate of the largest message can be doubted.
    per_byte = max(growth, 0.5 * seconds[-1] / sizes[-1])
    latency = max(0.0, seconds[0] - 2 * overhead)
    return Link(1 / per_byte, latency, overhead)


def fit_steps(
    machine: Machine, ranks: int, work: Workload, measured: Mapping[str, tuple[str, float]]
) -> Machine:
    """The machine with constants that explain how long tiny forward passes take.

    Parameters
    ----------
    machine : Machine
        Without these constants.
    ranks : int
    work : Workload
        So small that it is computing, latencies and what steps there are.
    measured : mapping of str to (str, float)
        By constant, `step` or `hop_overhead`, which are found one after the other: a method whose
        passes have many of these, and the seconds of the slowest rank on a layout of one column.
    """
    for name, (method, seconds) in measured.items():

        def total(value: float, machine=machine, name=name, method=method) -> float:
            there = replace(machine, **{name: value})
            return float(predict(there, method, Layout(ranks, 1), work)["forward"].total.max())

        found, slope = 0.0, (total(1e3) - total(0.0)) / 1e3
        for _ in range(30 if slope else 0):  # hidden behind latencies, it must grow to count
            found = max(0.0, found + (seconds - total(found)) / slope)
        machine = replace(machine, **{name: found})
    return machine


def steadiness(seconds: np.ndarray) -> str:
    """Say by how much repeated calls differ, and whether other work disturbed them.

    Parameters
    ----------
    seconds : (rounds, calls) float
        Of the same calls, again and again.

    Notes
    -----
    One round of ten may be off, either way; the call in the middle of all counts.
    """
    fast, slow = np.quantile(seconds, (0.1, 0.9), axis=0)
    off = float(np.median(slow / fast)) - 1
    said = f"the same kernel calls differ by {100 * off:.0f} % (of {len(seconds)} rounds)"
    return f"DISTURBED by other work: {said}" if off > STEADY else said
