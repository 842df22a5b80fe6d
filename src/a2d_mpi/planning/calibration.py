"""From measured seconds to a machine profile; `drivers/calibrate.py` measures.  No MPI import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.machine import KernelModel, Link, Machine, kernel_terms
from a2d_mpi.planning.model import predict
from a2d_mpi.schedules.problem import Workload

STEADY = 0.2  # a measurement is disturbed if its figures may be off by more


@dataclass(frozen=True)
class Sample:
    """A timed kernel call: visible pairs, queries, keys, queries cut, heads, seconds.

    `heads`: nheads, nheads_kv, headdim.
    """

    area: int
    nq: int
    nk: int
    cut: int
    heads: tuple[int, int, int]
    seconds: float


def fit_kernel(samples: Sequence[Sample], backward: bool) -> tuple[KernelModel, float]:
    """The `KernelModel` whose relative errors have the least squares, and the largest of them.

    No constant of a kernel is negative: of all sets of constants that come out positive the best
    one is taken, the others are 0.

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
    others = range(1, relative.shape[1])
    best, least = None, np.inf
    for size in range(len(others) + 1):
        for chosen in combinations(others, size):
            columns = [0, *chosen]
            found, *_ = np.linalg.lstsq(relative[:, columns] / scale[columns], np.ones(len(rows)))
            misses = relative[:, columns] @ (found / scale[columns]) - 1
            # One more constant has to earn its place.
            error = float(misses @ misses) * (1 + 0.02 * size)
            if found.min() >= 0 and found[0] > 0 and error < least:
                best, least = (columns, found / scale[columns], float(np.abs(misses).max())), error
    columns, found, worst = best
    values = dict(zip(columns, found.tolist()))
    names = [f.name for f in fields(KernelModel)]
    constants = {names[i]: x for i, x in values.items() if i}
    return KernelModel(1 / values[0], **constants), worst


def fit_link(
    sizes: Sequence[int], seconds: Sequence[float], flood: tuple[int, float], **others: float
) -> Link:
    """A `Link` from the seconds of exchanges of several sizes, ascending, the first one tiny.

    Parameters
    ----------
    sizes, seconds
        Bytes that every rank sends and receives in one message, and the time.
    flood : (int, float)
        Number of tiny messages posted together, and the time of all.
    others
        The other attributes of the link.
    """
    number, together = flood
    overhead = max(0.0, (together - seconds[0]) / max(1, number - 1) / 2)
    growth = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    # Noise: a slope that says more than the mean rate of the largest message can be doubted.
    per_byte = max(growth, 0.5 * seconds[-1] / sizes[-1])
    latency = max(0.0, seconds[0] - 2 * overhead)
    return Link(1 / per_byte, latency, overhead, **others)


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
        By constant, `step` or `turn`, which are found one after the other: a method whose passes
        have many of these, and the seconds of the slowest rank on a layout of one column.
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


def disturbance(shares: Sequence[float], seconds: Sequence[float]) -> tuple[float, str]:
    """By how much figures may be off, relative to them, because others used the machine, and why.

    Parameters
    ----------
    shares : sequence of float
        Looks at a kernel that all ranks call at once: CPU time of the ranks as a share, 0 to 1,
        of what their cores could give them.  Ranks that share cores only with each other get 1.
    seconds : sequence of float
        Of one such call, at each look.

    Notes
    -----
    One look of ten may be off, either way.
    """
    fast, slow = np.quantile(seconds, (0.1, 0.9))
    share = max(np.quantile(shares, 0.1), 1e-3)
    off = float(max(1 / share, slow / fast) - 1)
    return off, (
        f"ranks got {100 * share:.0f} % of the CPU time of their cores, the same kernel call took "
        f"{1e3 * fast:.3g} to {1e3 * slow:.3g} ms (of {len(seconds)} looks at both, the worst "
        "tenth left out)"
    )
