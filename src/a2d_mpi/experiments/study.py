"""The tables of `drivers/plot.py study`; no MPI import."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import phases_of, read_benchmark
from a2d_mpi.experiments.summary import Summary, summarise, table

CLOSE = 1.1  # a pick is good if it takes at most this multiple of the fastest plan's time


def print_study(files: Sequence[Path], read: Callable[[Path], list[Summary]]) -> int:
    """Print the tables of files; return the exit code.

    `read` returns the summaries of a file: for each plan its forward pass, and all phases.
    """
    passed, picks, good, off = True, 0, 0, []
    for path in files:
        summaries = read(path)
        ended = "passed" if all(x.passed for x in summaries) else "FAILED"
        passed &= ended == "passed"
        print(f"\n{path.name}: checks {ended}")
        for workload, ranks in dict.fromkeys((x.workload, x.ranks) for x in summaries):
            these = [x for x in summaries if (x.workload, x.ranks) == (workload, ranks)]
            print(table(these))
            plans = [x for x in these if _is_whole(x) and x.overlap]
            pick = next((x for x in plans if x.picked), None)
            if pick and len(plans) > 1:
                picks += 1
                good += pick.seconds <= CLOSE * min(x.seconds for x in plans)
        here = [x.predicted / x.seconds - 1 for x in filter(_is_whole, summaries)
                if not math.isnan(x.predicted)]  # fmt: skip
        off += here
        print(f"model: {_errors(here)}")
    print(f"\nmodel, all files: {_errors(off)}")
    print(f"picks within {100 * (CLOSE - 1):.0f} % of the fastest: {good} of {picks}")
    return 0 if passed else FAILED_CHECK


def read_measured(path: Path) -> list[Summary]:
    """Read the summaries of a benchmark: of each plan its forward pass, and all its phases."""
    return [
        summarise(result, phases)
        for result in read_benchmark(path).values()
        for phases in dict.fromkeys([("forward",), phases_of(result)])
    ]


def _is_whole(x: Summary) -> bool:
    """Return whether a summary has all phases that ran."""
    return (x.phase == "both") == bool(x.config["backward"])


def _errors(off: Sequence[float]) -> str:
    size = np.abs(off)
    if not len(size):
        return "no predictions"
    median, worst = 100 * np.median(size), 100 * size.max()
    return f"off by {median:.1f} % (median), {worst:.1f} % (worst of {len(size)})"
