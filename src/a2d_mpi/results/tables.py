"""Summaries of runs in files of results, for tables and plots; no MPI.

Every function raises OSError if a file cannot be read or written, and ValueError if its contents
are wrong.  The message is one line that names the file, for the user to read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2d_mpi.cli.options import FAILED_CHECK, aligned
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.layouts import known_as
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, check_output, flat, read_file
from a2d_mpi.schedules.method import METHODS

TABLE = ("  plan", "phase", "ms", "ratio", "wait", "predicted", "received", "checks")
CLOSE = 1.1  # a pick is good if it takes at most this multiple of the fastest plan's time
# Methods alone and with a head axis, in the order of tables and figures.
FAMILIES = tuple(
    method + heads for method in (*METHODS, "all-gather") for heads in ("", " + heads")
)


def all_passed(run: Mapping[str, Any]) -> bool:
    """Return whether all checks of a run in a file passed."""
    return all(x["passed"] for x in run["checks"].values())


def done_before(
    path: str | os.PathLike[str], resume: bool, settings: Mapping[str, object]
) -> dict[str, bool]:
    """Return the runs of a benchmark file by name, and whether all checks of each passed.

    Raises
    ------
    OSError
        If it cannot be read or written.
    ValueError
        If it exists and `resume` is false, or it was made with other settings, or by another
        program.
    """
    if not check_output(path, BENCHMARK_SCHEMA, resume):
        return {}
    tree = read_file(path, BENCHMARK_SCHEMA)
    earlier, done = tree["settings"], {x: all_passed(y) for x, y in tree["runs"].items()}
    for name in {**earlier, **settings}:
        here, there = settings.get(name), earlier.get(name)
        if here != there:
            raise ValueError(f"{path} was made with {name} {there}, but now it is {here}")
    return done


def read_measured(path: str | os.PathLike[str]) -> list[Summary]:
    """Read the summaries of all runs of a benchmark, of all phases that ran."""
    return [summarise(x) for x in read_file(path, BENCHMARK_SCHEMA)["runs"].values()]


@dataclass(frozen=True)
class Summary:
    """A summary of one result, measured or simulated, of one or both phases.

    Attributes
    ----------
    config : mapping
        Config of the result: method, workload, sizes, options.
    phase : str
        "forward", "backward" or "both".
    seconds : float
        Seconds of the slowest rank in the median trial, summed over the phases.
    parts : dict of str to float
        Seconds of this rank, by `PARTS`.  A simulation has "wait" only, the mean over all ranks.
    received : int
        Bytes that the busiest rank received in a call; 0 if not known.
    predicted : float
        Predicted seconds of the slowest rank; NaN without a profile.
    passed : bool
        Whether all checks passed.
    """

    config: Mapping[str, object]
    phase: str
    seconds: float
    parts: dict[str, float]
    received: int = 0
    predicted: float = math.nan
    passed: bool = True


def layout_of(config: Mapping[str, object]) -> Layout:
    """Return the grid and the order of the ranks of a result."""
    rows, cols, heads = (int(config[x]) for x in ("rows", "cols", "heads"))
    block = tuple(map(int, str(config["block"]).split("x")))
    return Layout(rows, cols, heads, str(config["order"]), block)


def family_of(config: Mapping[str, object]) -> str:
    """Return the method, or its common name as in papers; "+ heads" if ranks share the heads."""
    layout, method = layout_of(config), str(config["method"])
    known = known_as(method, layout)
    return (known if known in FAMILIES else method) + " + heads" * (layout.heads > 1)


def plan_text(config: Mapping[str, object]) -> str:
    """Return method, grid, slices, and "in turn" if a plan computes and communicates in turn."""
    layout, slices = layout_of(config), config["slices"]
    sliced = f" in {slices} slices" * (slices != "1x1")
    grid = f"{config['method']} {layout.shape}@{layout.numbering}"
    return grid + sliced + " in turn" * (not config["overlap"])


def summarise(run: Mapping[str, Any], phases: Sequence[str] = ()) -> Summary:
    """Combine the numbers of some phases of a run in a benchmark file; default: all it has."""
    phases = phases or list(run["timings"])
    seconds, parts, moved = 0.0, dict.fromkeys(PARTS, 0.0), []
    for phase in phases:
        timings = run["timings"][phase]
        total = timings["total"]  # (trials, ranks)
        slowest = total.max(axis=1)  # the trial whose slowest rank took the (lower) median
        trial = int(np.argsort(slowest, kind="stable")[(len(slowest) - 1) // 2])
        rank = int(total[trial].argmax())
        own = {x: timings[x][trial, rank] for x in PARTS[:-1]}
        own["other"] = max(0.0, total[trial, rank] - sum(own.values()))
        parts = {x: parts[x] + float(own[x]) for x in PARTS}
        seconds += float(total[trial, rank])
        moved += run["traffic"].get(phase, {}).values()
    predicted = run.get("predicted", {})
    return Summary(
        config=run["config"],
        phase="both" if len(phases) > 1 else phases[0],
        seconds=seconds,
        parts=parts,
        received=int(sum((x["received"] for x in moved), np.zeros(1, np.int64)).max()),
        predicted=sum(float(predicted.get(f"{phase} seconds", np.nan)) for phase in phases),
        passed=all_passed(run),
    )


def table(summaries: Sequence[Summary]) -> str:
    """Format one line for each summary of one workload on one number of ranks.

    "ratio" is the seconds divided by the seconds of the planner's pick, or of the fastest plan if
    there is no pick.
    """
    first, rows = summaries[0], [TABLE]
    for summary in summaries:
        rivals = [y for y in summaries if y.phase == summary.phase]
        best = min(rivals, key=lambda y: (not y.config["picked"], y.seconds))
        rows.append((
            f"  {plan_text(summary.config)}",
            summary.phase,
            f"{1e3 * summary.seconds:.2f}",
            f"{summary.seconds / best.seconds:.2f}",
            f"{1e3 * summary.parts['wait']:.2f}",
            "" if math.isnan(summary.predicted) else f"{1e3 * summary.predicted:.2f}",
            f"{summary.received or ''}",
            ("passed" if summary.passed else "FAILED")
            + "  (picked)" * bool(summary.config["picked"]),
        ))  # fmt: skip
    title = f"{first.config['workload']}, {first.config['ranks']} ranks"
    return f"{title}\n{aligned(rows, left=(0, 1, len(TABLE) - 1))}"


def print_study(files: Sequence[Path], read: Callable[[Path], list[Summary]]) -> int:
    """Print the tables of files, whose summaries `read` returns; return the exit code."""
    passed, picks, good, off = True, 0, 0, []
    for path in files:
        summaries = read(path)
        ended = "passed" if all(x.passed for x in summaries) else "FAILED"
        passed &= ended == "passed"
        print(f"\n{path.name}: checks {ended}")
        groups: dict[tuple[object, object], list[Summary]] = {}
        for x in summaries:
            groups.setdefault((x.config["workload"], x.config["ranks"]), []).append(x)
        for these in groups.values():
            print(table(these))
            plans = [x for x in these if x.config["overlap"]]
            pick = next((x for x in plans if x.config["picked"]), None)
            if pick and len(plans) > 1:
                picks += 1
                good += pick.seconds <= CLOSE * min(x.seconds for x in plans)
        here = [x.predicted / x.seconds - 1 for x in summaries if not math.isnan(x.predicted)]
        off += here
        print(f"model: {_errors(here)}")
    print(f"\nmodel, all files: {_errors(off)}")
    print(f"picks within {100 * (CLOSE - 1):.0f} % of the fastest: {good} of {picks}")
    return 0 if passed else FAILED_CHECK


def _errors(off: Sequence[float]) -> str:
    size = np.abs(off)
    if not len(size):
        return "no predictions"
    median, worst = 100 * np.median(size), 100 * size.max()
    return f"off by {median:.1f} % (median), {worst:.1f} % (worst of {len(size)})"


def kernel_speeds(times: Mapping[str, object]) -> dict[str, dict[str, float]]:
    """Compute median TFLOP/s of bench.py kernels, by mask and phase, then by implementation.

    The masks and phases with the least work come first.
    """
    speeds: dict[str, dict[str, float]] = {}
    for call, seconds in flat(times).items():
        group, _, name = call.rpartition("/")
        if (work := times.get(f"tflop/{group}")) is not None:
            speeds.setdefault(group, {})[name] = work / float(np.median(seconds))
    return dict(sorted(speeds.items(), key=lambda x: (times[f"tflop/{x[0]}"], x[0])))
