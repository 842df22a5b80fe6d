"""Prediction by SimGrid, which shares a network's links among all messages.

SimGrid replays the programs (`a2d_mpi.planning.survey`) that `a2d_mpi.planning.simulator` runs, as
an independent check of it.  The network may be any of `a2d_mpi.planning.network`.  SimGrid runs in
a process of its own.  Its program is compiled from ``replay.cpp`` when it is first needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.model import Phase, predict
from a2d_mpi.planning.network import Cables, Network
from a2d_mpi.planning.simulator import WAIT, Messages, Operations, spent
from a2d_mpi.planning.survey import Survey
from a2d_mpi.planning.workload import Workload

NEEDS = (
    "simulations need SimGrid and a compiler: apt-get install g++ libsimgrid-dev (Debian, Ubuntu)"
)
# SimGrid models TCP by default.  All of that is switched off: measured profiles contain it, or the
# machine has no TCP.  In this order: factors of bandwidth and latency, the limit of the window
# (gamma), the penalty of flows over many links (weight), and the traffic of acknowledgements.
OPTIONS = (
    "network/model:CM02",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/TCP-gamma:0",
    "network/weight-S:0",
    "network/crosstraffic:0",
    "contexts/factory:raw",
    "contexts/stack-size:64",
)
SWITCH = Network()
_SPEND, _SEND, _RECEIVE, _WAIT = range(4)  # as in replay.cpp


def simulate(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    distribution: str | None = None,
    network: Network = SWITCH,
    coarse: float = 0.0,
) -> dict[str, Phase]:
    """Predict the seconds of every rank in SimGrid, by phase.

    Parameters
    ----------
    machine, method, layout, work, distribution
        As of `a2d_mpi.planning.model.predict`.
    network : Network
    coarse : float
        Seconds.  Messages whose ends are this close count as one event, and links are shared anew
        once for it.  So a message may end this much too early or too late.  The errors add up
        along a chain of messages that wait for each other, such as the hops of a ring.  0:
        SimGrid's nanosecond.

    Raises
    ------
    ValueError
        If SimGrid is not installed, the heads do not fit the layout, or the machine has no kernel
        for the dtype.
    """

    def replayed(machine: Machine, layout: Layout, survey: Survey, spans: None) -> Phase:
        cables = Cables(network, machine, layout.size)
        now, waited = _run(replay_input(*survey[:2], cables, layout.world_ranks()), coarse)
        parts = {**spent(survey.operations), "wait": waited}
        assert np.allclose(sum(parts.values()), now), "a rank's time is not what it spent"
        return Phase(**parts)

    return predict(machine, method, layout, work, distribution, run=replayed)


def replay_input(
    operations: Operations,
    messages: Messages,
    cables: Cables,
    place: np.ndarray,
) -> list[np.ndarray]:
    """Return the arrays that the replayer reads, in its order.

    The parameters are as of `a2d_mpi.planning.simulator.simulate`.
    """
    ops, seconds, sides, ranges = [], [], [], [0]
    receivers, size = messages.to.tolist(), len(operations.first) - 1
    for rank in range(size):
        for kind, busy, numbers in operations.of_rank(rank):
            seconds.append(busy)
            if kind == WAIT:
                ops.append((_WAIT, len(sides), len(numbers)))
                sides += [2 * m + (receivers[m] == rank) for m in numbers]
                continue
            ops.append((_SPEND, 0, 0))
            ops += [(_RECEIVE if receivers[m] == rank else _SEND, m, 0) for m in numbers]
            seconds += [0.0] * len(numbers)
        ranges.append(len(ops))
    ends = np.divmod(np.unique(messages.source * size + messages.to), size)
    routes = cables.routes(*(place[x] for x in ends))
    first = np.concatenate([[0], np.cumsum((routes >= 0).sum(axis=1))])
    latency = cables.latency(place[messages.source], place[messages.to])
    return [
        cables.bandwidth, *ends, first, routes[routes >= 0], messages.nbytes, latency,
        np.array(ops, np.int64).reshape(-1, 3), np.array(seconds, float),
        np.array(sides, np.int64), np.array(ranges[:-1]), np.array(ranges[1:]),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="a2d_mpi-replay-")  # removed when Python ends


@lru_cache(maxsize=1)
def replayer() -> Path:
    """Return the path of the replaying program; compile it first if there is none yet.

    Raises
    ------
    ValueError
        If it cannot be compiled.  The message says what to install.
    """
    binary = Path(_folder().name) / "replay"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(f"{NEEDS}; {compiler} was not found")
    source = Path(__file__).with_name("replay.cpp")
    command = [compiler, "-std=c++17", "-O2", "-o", binary, source, "-lsimgrid"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if "error" in x] or ["?"]
        raise ValueError(f"{NEEDS}; {compiler} says: {errors[0][:200]}")
    return binary


def _run(arrays: Sequence[np.ndarray], coarse: float) -> np.ndarray:
    """Run SimGrid; return the end and the wait of each rank, (2, P)."""
    with tempfile.TemporaryDirectory(dir=_folder().name) as folder:
        given, results = Path(folder) / "in", Path(folder) / "out"
        with open(given, "wb") as file:
            for x in arrays:
                x = np.ascontiguousarray(x)
                rows = x.size // (x.shape[1] if x.ndim > 1 else 1)
                file.write(np.int64(rows).tobytes() + x.tobytes())
        options = [f"--cfg={x}" for x in OPTIONS] + ["--log=root.thres:warning"]
        if coarse:
            # A NumPy float has another repr.
            options.append(f"--cfg=surf/precision:{float(coarse)!r}")
        command = [replayer(), given, results, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"the replay failed: {lines[-1]}")
        return np.fromfile(results).reshape(2, -1)
