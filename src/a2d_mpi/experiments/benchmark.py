"""Files of many measurements, such as the file of drivers/bench.py.

::

    /                 attributes: schema, schema_version
    /settings         attributes that all results share (trials, seed, ...)
    /runs/<name>      laid out as the root of a result file; see `a2d_mpi.experiments.results`
    /figures/<name>   written by bench.py kernels.  Attributes: origin, options, "tflop/<call>":
                      TFLOP of a call, ...
        <call>        (trials,) seconds of each call

Results are added to a copy of the file, which then replaces it, so that the file is complete at
any moment.  Functions raise OSError and ValueError as in `a2d_mpi.experiments.results`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from a2d_mpi.experiments.hdf5 import arrays, check_output, needed, plain, reading
from a2d_mpi.experiments.results import Result, fill, load, new_file, set_attributes

SCHEMA = ("a2d_mpi benchmark", 1)


def start_benchmark(
    path: str | os.PathLike[str], settings: Mapping[str, object], resume: bool
) -> dict[str, bool]:
    """List the results of a file; nothing is written.

    Parameters
    ----------
    path : path
    settings : mapping
        Settings of this run, which all results of a file share.
    resume : bool
        Whether the file may exist.

    Returns
    -------
    dict of str to bool
        By name of each result: whether all checks passed.

    Raises
    ------
    ValueError
        If the file exists and `resume` is false, or it was made with other settings.
    """
    if not check_output(path, SCHEMA, resume):
        return {}
    with reading(path, SCHEMA) as file:
        earlier = plain(needed(file, "settings").attrs)
        for name in {**earlier, **settings}:
            here, there = settings.get(name), earlier.get(name)
            if here != there:
                raise ValueError(f"{path} was made with {name} {there}, but now it is {here}")
        return {
            name: all(
                needed(file, f"runs/{name}/checks/{x}").attrs["passed"]
                for x in needed(file, f"runs/{name}/checks")
            )
            for name in needed(file, "runs")
        }


def add_results(
    path: str | os.PathLike[str], settings: Mapping[str, object], results: Mapping[str, Result]
) -> None:
    """Add results by name to a file, or make the file; if writing fails, nothing changes."""
    there = os.path.exists(path)
    if there and not results:
        return
    with new_file(path, SCHEMA, extend=there) as file:
        if not there:
            set_attributes(file.create_group("settings"), settings)
            file.create_group("runs")
        for name, result in results.items():
            fill(file["runs"].create_group(name), result)


def read_benchmark(path: str | os.PathLike[str]) -> dict[str, Result]:
    """Read all results of a file, by name."""
    with reading(path, SCHEMA) as file:
        return {name: load(needed(file, f"runs/{name}")) for name in needed(file, "runs")}


@dataclass
class Entry:
    """One measurement in a file of many: a group of the file.

    Attributes
    ----------
    attributes : dict
        Attributes of the group.
    arrays : dict of str to array
        Datasets of the group.  Default: none.
    """

    attributes: dict[str, object]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def write_entries(
    path: str | os.PathLike[str],
    schema: tuple[str, int],
    entries: Mapping[str, Entry],
    extend: bool = True,
) -> None:
    """Write groups by name ("/" is the root) to a file; if writing fails, nothing changes.

    With `extend` an existing file keeps its other groups; groups of the same names are replaced.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    with new_file(path, schema, extend=extend and os.path.exists(path)) as file:
        for name in entries.keys() - {"/"}:
            if name in file:
                del file[name]
        for name, entry in entries.items():
            group = file.require_group(name)
            set_attributes(group, entry.attributes)
            for key, x in entry.arrays.items():
                group[key] = x


def read_entries(
    path: str | os.PathLike[str], schema: tuple[str, int], parent: str = "runs"
) -> dict[str, Entry]:
    """Read the groups in the group `parent` of a file, by name.

    Raises
    ------
    OSError
        If the file cannot be read, or has no such group.
    ValueError
        If the schema is wrong.
    """
    with reading(path, schema) as file:
        groups = {name: needed(file, f"{parent}/{name}") for name in needed(file, parent)}
        return {name: Entry(plain(x.attrs), arrays(x)) for name, x in groups.items()}


def kernel_speeds(times: Entry) -> dict[str, dict[str, float]]:
    """Compute median TFLOP/s of bench.py kernels, by mask and phase, then by implementation.

    The masks and phases with the least work come first.
    """
    speeds: dict[str, dict[str, float]] = {}
    for call, seconds in times.arrays.items():
        group, _, name = call.rpartition("/")
        if (work := times.attributes.get(f"tflop/{group}")) is not None:
            speeds.setdefault(group, {})[name] = work / float(np.median(seconds))
    return dict(sorted(speeds.items(), key=lambda x: (times.attributes[f"tflop/{x[0]}"], x[0])))
