"""Files of results: of one run, or of many.

Every function raises OSError if a file cannot be read or written, and ValueError if its contents
are wrong.  The message is one line that names the file, for the user to read.

In files of many runs the group ``origins`` has the different origins of the runs, and the group
``origin`` of a run is a link.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from a2d_mpi.experiments.hdf5 import Tree, fill, flat, key_of, load, new_file, read_file
from a2d_mpi.experiments.result import SCHEMA, Check, Result, tree_of

BENCHMARK_SCHEMA = ("a2d_mpi benchmark", 2)
LINEAR_SCHEMA = ("a2d_mpi linear attention", 2)
TRAINING_SCHEMA = ("a2d_mpi.training", 1)


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read a file of `write_result`, including the outputs.

    Raises
    ------
    OSError
        If the file cannot be read, or lacks something.
    ValueError
        If the schema is wrong.
    """

    def build(root: Tree) -> Result:
        root["origin"] = {x: y for x, y in root.items() if not isinstance(y, (Tree, np.ndarray))}
        return _result(root)

    return read_file(path, SCHEMA, build)


def add_results(
    path: str | os.PathLike[str], settings: Mapping[str, object], results: Mapping[str, Result]
) -> None:
    """Add results by name to a file, or make the file; if writing fails, nothing changes."""
    runs = {name: tree_of(result) for name, result in results.items()}
    extend_file(path, BENCHMARK_SCHEMA, {"settings": settings, "runs": runs})


def read_benchmark(path: str | os.PathLike[str]) -> dict[str, Result]:
    """Read all results of a file, by name."""

    def build(tree: Tree) -> dict[str, Result]:
        return {name: _result(run) for name, run in tree["runs"].items()}

    return read_file(path, BENCHMARK_SCHEMA, build)


def _result(run: Tree) -> Result:
    """Return the result of a tree that was read."""
    return Result(
        provenance={**run["origin"], "utc_time": run["utc_time"]},
        config=run["config"],
        area=run["area"],
        timings=flat(run["timings"]),
        traffic={
            f"{phase}/{channel}": counts
            for phase, channels in run["traffic"].items()
            for channel, counts in channels.items()
        },
        checks={
            name: Check(x["error"], x["bound"], x["rows"], x.get("as_given"))
            for name, x in run["checks"].items()
        },
        outputs=flat(run.get("outputs", {})),
        predicted=run.get("predicted", {}),
    )


def extend_file(path: str | os.PathLike[str], schema: tuple[str, int], tree: Mapping) -> None:
    """Add what is in the groups of a tree to a file, or make the file.

    Members of the file's groups that have the same names are replaced.  A run may have a group
    "origin", which is stored once.  If writing fails, nothing changes.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    with new_file(path, schema, extend=os.path.exists(path)) as file:
        for name, members in tree.items():
            for run in members.keys() & file.require_group(name).keys():
                del file[name][run]
        origins = file.require_group("origins")
        written = {key_of(load(x)): x for x in origins.values()}
        runs = [x for members in tree.values() for x in members.values()]
        for origin in (x["origin"] for x in runs if isinstance(x, Mapping) and "origin" in x):
            if key_of(origin) not in written:
                fill(origins, {f"{len(origins)}": origin}, written)
        fill(file, tree, written)


def usual_trial(total: np.ndarray) -> int:
    """Return the trial of `total`, (trial, rank), whose slowest rank took the (lower) median."""
    slowest = total.max(axis=1)
    return int(np.argsort(slowest, kind="stable")[(len(slowest) - 1) // 2])
