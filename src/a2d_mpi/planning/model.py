"""Predicted seconds of a method on a machine: the programs of all ranks, simulated.

All ranks start together.  Each rank runs the steps of its program (`a2d_mpi.planning.survey`) and
waits for messages that have not arrived.  Messages share the links of a network
(`a2d_mpi.planning.simulator`).  This module does not import MPI and knows no method.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.network import SWITCH, Cables, Network
from a2d_mpi.planning.simulator import Spans, simulate
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.writing import problem_of


@dataclass(frozen=True)
class Phase:
    """Seconds of every rank in each part of a phase, (P,) float64.

    `compute`, `merge` and `wait` are defined as in ``AttentionPlan.timings``.  `other` is the time
    of everything else: starting the call, posting messages, and clearing.
    """

    compute: np.ndarray
    merge: np.ndarray
    wait: np.ndarray
    other: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of every rank, (P,) float64: the sum of the parts."""
        return self.compute + self.merge + self.wait + self.other


def simulated(
    machine: Machine,
    layout: Layout,
    survey: Survey,
    spans: list[Spans] | None = None,
    network: Network = SWITCH,
) -> Phase:
    """Run the simulator on the survey of a phase; `spans` as of `simulator.simulate`."""
    cables = Cables(network, machine, layout.size)
    return Phase(**simulate(*survey[:2], cables, layout.world_ranks(), spans))


def predict(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    distribution: str | None = None,
    spans: dict[str, list[Spans]] | None = None,
    network: Network = SWITCH,
) -> dict[str, Phase]:
    """Predict the seconds of every rank, by phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
    work : Workload
    distribution : str, optional
        Default: the one that the method takes for the mask.
    spans : dict, optional
        The spans of the simulator are written here, by phase and rank; seconds since the phase
        began.
    network : Network
        Links between the nodes.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    problem, phases = problem_of(method, layout, work, work.seen, distribution), {}
    for phase in work.phases:
        trace = None if spans is None else [[] for _ in range(layout.size)]
        survey = survey_of(machine, method, layout, work, problem, phase)
        phases[phase] = simulated(machine, layout, survey, trace, network)
        if spans is not None:
            spans[phase] = trace
    return phases
