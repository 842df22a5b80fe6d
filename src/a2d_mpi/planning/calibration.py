"""Fit of a machine profile to the seconds that `drivers/calibrate.py` measures.  No MPI import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.machine import Heads, KernelModel, Link, Machine, kernel_terms
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.workload import Workload

STEADY = 0.2  # a measurement is called disturbed if repeated calls differ by a larger share


class Sample(NamedTuple):
    """A timed kernel call.

    Attributes
    ----------
    call : (int, int, int, int)
        Visible pairs, queries, keys, and queries of which the mask cuts a run of keys.
    heads : Heads
    seconds : float
    """

    call: tuple[int, int, int, int]
    heads: Heads
    seconds: float


def fit_kernel(samples: Sequence[Sample], backward: bool) -> tuple[KernelModel, float]:
    """Fit a `KernelModel` to timed calls by least squares of the relative errors.

    No constant of a kernel may be negative.  The most negative constant is set to 0 and the fit
    is repeated until none is negative.

    Returns
    -------
    KernelModel
    float
        The largest relative error.
    """
    rows = np.array([kernel_terms(x.call, x.heads, backward) for x in samples])
    relative = rows / np.array([[x.seconds] for x in samples])
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    columns = list(range(relative.shape[1]))
    while True:
        chosen = relative[:, columns] / scale[columns]
        solution, *_ = np.linalg.lstsq(chosen, np.ones(len(rows)))
        if len(columns) == 1 or (solution[0] > 0 and solution[1:].min() >= 0):
            break
        del columns[1 + int(solution[1:].argmin())]
    worst = float(np.abs(chosen @ solution - 1).max())
    values = dict(zip(columns, (solution / scale[columns]).tolist()))
    names = [f.name for f in fields(KernelModel)]
    constants = {names[i]: x for i, x in values.items() if i}
    return KernelModel(1 / values[0], **constants), worst


def fit_link(sizes: Sequence[int], seconds: Sequence[float], flood: tuple[int, float]) -> Link:
    """Fit a `Link` to the seconds of exchanges.

    Parameters
    ----------
    sizes, seconds : sequence
        Bytes that every rank sends and receives in one message, in ascending order from a tiny
        one, and the seconds of each exchange.
    flood : (int, float)
        Number of tiny messages that are posted together, and the seconds of all of them.
    """
    number, together = flood
    overhead = max(0.0, (together - seconds[0]) / max(1, number - 1) / 2)
    growth = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    # Noise may make the slope far too small, so take at least half of the largest message's mean.
    per_byte = max(growth, 0.5 * seconds[-1] / sizes[-1])
    latency = max(0.0, seconds[0] - 2 * overhead)
    return Link(1 / per_byte, latency, overhead)


def fit_steps(
    machine: Machine, ranks: int, work: Workload, measured: Mapping[str, tuple[str, float]]
) -> Machine:
    """Fit the constants `step` and `hop_overhead` of a machine to tiny forward passes.

    Parameters
    ----------
    machine : Machine
        Without these constants.
    ranks : int
    work : Workload
        A workload that is so small that steps take most of the time.
    measured : mapping of str to (str, float)
        By constant, in the order of the fit: a method that depends on the constant, and the
        measured seconds of its slowest rank on a layout of one column.

    Returns
    -------
    Machine
        With the constants.
    """
    for name, (method, seconds) in measured.items():

        def total(value: float, machine=machine, name=name, method=method) -> float:
            there = replace(machine, **{name: value})
            return float(predict(there, method, Layout(ranks, 1), work)["forward"].total.max())

        constant, slope = 0.0, (total(1e3) - total(0.0)) / 1e3
        # Several times: latencies hide a small constant, so the time is not linear in it.
        for _ in range(30 if slope else 0):
            constant = max(0.0, constant + (seconds - total(constant)) / slope)
        machine = replace(machine, **{name: constant})
    return machine


def steadiness(seconds: np.ndarray) -> str:
    """Say by how much repeated calls differ, and whether other work disturbed them.

    Parameters
    ----------
    seconds : (rounds, calls) float
        Each round times the same calls.

    Notes
    -----
    The difference of a call is the ratio of its 90 % and 10 % quantiles over the rounds.  The
    median over all calls counts.
    """
    fast, slow = np.quantile(seconds, (0.1, 0.9), axis=0)
    off = float(np.median(slow / fast)) - 1
    text = f"times of equal kernel calls differ by {100 * off:.0f} % ({len(seconds)} rounds)"
    return f"DISTURBED by other work: {text}" if off > STEADY else text
