"""The file of a benchmark: many results in one, whole at any moment.

::

    /                 attributes: schema, schema_version
    /settings         attributes: what is the same for all results (trials, seed, ...)
    /runs/<name>      laid out as the root of a result file; see `a2d_mpi.experiments.results`
    /figures/<name>   of bench_gpu.py and bench_tile.py.  Attributes: see `KernelTimes`
        <call>        (trials,) seconds of the slowest rank

Whenever results are added, an extended copy takes the place of the file.  Functions raise OSError
and ValueError as those of `a2d_mpi.experiments.results` do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.atomic import check_writable
from a2d_mpi.experiments.hdf5 import arrays, check_output, needed, plain, reading
from a2d_mpi.experiments.results import Result, fill, load, new_file, set_attributes

SCHEMA = ("a2d_mpi benchmark", 1)


def extends(path: str | os.PathLike[str], resume: bool, nbytes: int = 0) -> bool:
    """Tell whether a file is there to be extended; nothing is written.

    Raises
    ------
    OSError
        If a file of `nbytes` cannot be written there.
    ValueError
        If it exists and `resume` is false.
    """
    check_writable(path, nbytes)
    there = os.path.exists(path)
    if there and not resume:
        raise ValueError(f"{path} exists: --resume adds to it, or remove it")
    return there


def start_benchmark(
    path: str | os.PathLike[str], settings: Mapping[str, object], resume: bool
) -> dict[str, bool]:
    """List the results that a file has; nothing is written.

    Parameters
    ----------
    path : path
    settings : mapping
        Of this run; the same for all results of a file.
    resume : bool
        Whether the file may exist.

    Returns
    -------
    dict of str to bool
        By name of the results that are there: whether all checks passed.

    Raises
    ------
    ValueError
        If it exists and `resume` is false, or it was made with other settings.
    """
    if not extends(path, resume):
        return {}
    with reading(path, SCHEMA) as file:
        found = plain(needed(file, "settings").attrs)
        for name in {**found, **settings}:
            here, there = settings.get(name), found.get(name)
            if here != there:
                raise ValueError(f"{path} was made with {name} {there}, not {here}")
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
    """Add results by name to what is there, or make the file; all of it, or nothing changes."""
    there = os.path.exists(path)
    if there and not results:
        return
    with new_file(path, extend=there) as file:
        if not there:
            set_attributes(file, {"schema": SCHEMA[0], "schema_version": SCHEMA[1]})
            set_attributes(file.create_group("settings"), settings)
            file.create_group("runs")
        for name, result in results.items():
            fill(file["runs"].create_group(name), result)


def read_benchmark(path: str | os.PathLike[str]) -> dict[str, Result]:
    """All results of a file, by name."""
    with reading(path, SCHEMA) as file:
        return {name: load(needed(file, f"runs/{name}")) for name in needed(file, "runs")}


@dataclass
class KernelTimes:
    """The times of one run of drivers/bench_gpu.py or drivers/bench_tile.py.

    Attributes
    ----------
    attributes : dict
        Origin, options, ranks, ...; "tflop/<call>": TFLOP of a call.
    seconds : dict of str to (trials,) float64
        Of the slowest rank, by call.
    """

    attributes: dict[str, object]
    seconds: dict[str, np.ndarray]


def add_kernel_times(path: str | os.PathLike[str], name: str, times: KernelTimes) -> None:
    """Add the times of one run to a file, in place of earlier ones, or make the file.

    Raises
    ------
    OSError, ValueError
        If it cannot be written, or is no benchmark file.
    """
    check_output(path, SCHEMA)
    add_results(path, {}, {})
    with new_file(path, extend=True) as file:
        if f"figures/{name}" in file:
            del file[f"figures/{name}"]
        group = file.create_group(f"figures/{name}")
        set_attributes(group, times.attributes)
        for call, x in times.seconds.items():
            group.create_dataset(call, data=x)


def read_kernel_times(path: str | os.PathLike[str], *names: str) -> dict[str, KernelTimes]:
    """The times of these runs, default of all, by name; OSError or ValueError if it has none."""
    with reading(path, SCHEMA) as file:
        groups = {x: needed(file, f"figures/{x}") for x in names or needed(file, "figures")}
        return {name: KernelTimes(plain(x.attrs), arrays(x)) for name, x in groups.items()}
