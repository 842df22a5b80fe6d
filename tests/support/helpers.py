"""Helpers that several test files use."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

ROOT = Path(__file__).parents[2]
DRIVERS = ROOT / "drivers"
SAMPLE = ROOT / "data" / "minilm_l3_1536.h5"
SECONDS = 300  # after which a program that takes a few hangs, on a busy machine, too
# Without Numba, kernel "auto" is "numpy".  Importing Numba takes longer than most jobs.
NO_NUMBA = 'sys.modules["numba"] = None'
# Run a driver after a few lines of sabotage.  `rank` is this process's rank.  Import the package
# first, as the drivers do: it may choose NumPy's matrix products, which changes the last bits.
SABOTAGE = """
import os, runpy, sys
{}
import a2d_mpi
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
{}
sys.argv = [{driver!r}, *sys.argv[1:]]
runpy.run_path({driver!r}, run_name="__main__")
"""
# Run drivers one after the other, each with a list of options, more options on rank 1, and perhaps
# on the first few ranks only, while the others sleep.
EACH = """
import json, os, runpy, sys, time
{}
import a2d_mpi
from mpi4py import MPI
world = MPI.COMM_WORLD
rank = world.rank
{}
for driver, options, more, *few in json.loads(sys.argv[1]):
    sys.argv = [driver, *options, *more * (rank == 1)]
    code = 0
    if few:
        MPI.COMM_WORLD = world.Split(0 if rank < few[0] else MPI.UNDEFINED, rank)
    try:
        if MPI.COMM_WORLD:
            runpy.run_path(driver, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    if few:
        MPI.COMM_WORLD, arrived = world, world.Ibarrier()
        while not arrived.Test():
            time.sleep(0.005)
    if rank == 0:
        print("exit code", code, flush=True)
"""
MPIEXEC = os.environ.get("MPIEXEC") or str(Path(sys.executable).with_name("mpiexec"))
MPIEXEC = [MPIEXEC] if Path(MPIEXEC).exists() else MPIEXEC.split()  # it may have options
# Let Open MPI run as root and with more ranks than cores; see jobs/env.sh.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


# Marks of parameters that test in depth: they run in the second tier, with one MPI.
DEEPER = pytest.mark.thorough, pytest.mark.one_mpi


def deeper(values: Iterable[object], first: Container[object]) -> list:
    """Return parameters of a test; mark the ones that are not in `first` as `thorough`."""
    return [pytest.param(x, marks=() if x in first else DEEPER) for x in values]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest |a - b|; equal infinities are 0 apart, NaN is infinitely far."""
    import numpy as np

    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(a == b, 0, np.abs(a - b)), nan=np.inf).max(initial=0)


def bounds_for(
    dtype: np.dtype,
    softmax_scale: float,
    inputs: Sequence[np.ndarray],
    exact: Mapping[str, np.ndarray],
    same_precision: Mapping[str, float],
) -> dict[str, float]:
    """Return `error_bounds` for the whole q, k, v, dout and the float64 reference."""
    import numpy as np

    from a2d_mpi.checks.check import error_bounds

    norms = {
        name: np.linalg.norm(x.astype(float), axis=-1).max(initial=0)
        for name, x in zip(("q", "k", "v", "dout"), inputs)
    }
    largest = {x: distance(np.where(np.isfinite(y), y, 0), 0) for x, y in exact.items()}
    return error_bounds(dtype, softmax_scale, norms, largest, same_precision)


@cache
def module_of(program: str) -> ModuleType:
    """Import a program of the repository, for example "drivers/plan.py"."""
    path = ROOT / program
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """Build the parser of a program of the repository."""
    folder, _, name = program.partition("/")
    if folder == "drivers":
        from a2d_mpi.__main__ import build_parser

        return build_parser(name.removesuffix(".py"))
    return module_of(program).build_parser()


def parsers_of(program: str) -> list[argparse.ArgumentParser]:
    """Build the parsers of a program and of its subcommands."""
    parser = parser_of(program)
    return [parser, *parser.commands.values()]


def options_of(program: str) -> set[str]:
    """Return the names of all options of a program and of its subcommands."""
    actions = (action for parser in parsers_of(program) for action in parser._actions)
    return {name for action in actions for name in action.option_strings}


def assert_all(comm: MPI.Intracomm, ok: bool, message: str) -> None:
    """Fail on all ranks of `comm` if `ok` is false on any rank, with the messages of these ranks.

    Collective over `comm`, unlike a plain assert, which would leave the other ranks waiting.
    """
    __tracebackhide__ = True
    failed = {}
    for rank, problem in enumerate(comm.allgather(None if ok else str(message))):
        if problem is not None:
            failed.setdefault(problem, []).append(rank)
    if failed:
        pytest.fail(
            "\n".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {problem}"
                for problem, ranks in failed.items()
            )
        )


def read_run(path: str | Path) -> dict[str, Any]:
    """Read a file of drivers/attention.py."""
    from a2d_mpi.results.hdf5 import RESULT_SCHEMA, read_file

    return read_file(path, RESULT_SCHEMA)


def read_runs(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the runs of a file of drivers/bench.py, by name."""
    from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, read_file

    return read_file(path, BENCHMARK_SCHEMA)["runs"]


def execute(
    *words: object,
    timeout: float = SECONDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
) -> subprocess.CompletedProcess:
    """Run a Python command on some ranks with the MPI of this environment; 0: without mpiexec.

    `options` are options of mpiexec.

    Raises
    ------
    subprocess.TimeoutExpired
        After `timeout` seconds, when all processes have ended.
    """
    with subprocess.Popen(
        [str(x) for x in words],
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            # Terminate first: if Open MPI's mpiexec is killed at once, its ranks stay.
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, stdout, stderr)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{stdout}{stderr}"
    return done


def launch(
    ranks: int,
    *command: object,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    **others: object,
) -> subprocess.CompletedProcess:
    """Run a Python command on some ranks, with the MPI of this environment; 0: without mpiexec.

    `options`: of mpiexec.  `others`: of `execute`.
    """
    start = [*MPIEXEC, *options, "-n", ranks] if ranks else []
    return execute(*start, sys.executable, *command, env=ENVIRONMENT | (env or {}), **others)


@contextmanager
def named(case: object) -> Iterator[None]:
    """Add the case to the message of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def drive(
    program: str,
    ranks: int,
    *options: object,
    sabotage: str = "",
    timeout: float = SECONDS,
    numba: bool = False,
    mpi: Sequence[str] = (),
    code: int | None = 0,
) -> subprocess.CompletedProcess:
    """Run a driver, after the lines of Python in `sabotage`; see `launch`.

    `mpi` are options of mpiexec.
    """
    name, *words = program.split()  # "bench.py train": with its subcommand
    path = str(DRIVERS / name)
    source = SABOTAGE.format("" if numba else NO_NUMBA, sabotage, driver=path)
    return launch(ranks, "-c", source, *words, *options, timeout=timeout, options=mpi, code=code)


def drive_on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    ranks: int,
    *options: object,
    gpus: int = 1,
    **more: object,
) -> subprocess.CompletedProcess:
    """Run a driver on the emulated GPU; see `drive`."""
    if shutil.which("g++") is None:
        pytest.skip("no GPU emulation: g++ is not installed")
    emulated = str(ROOT / "tests" / "gpu" / "emulated")
    monkeypatch.setenv("PYTHONPATH", emulated, prepend=os.pathsep)
    monkeypatch.setenv("EMULATED_GPUS", str(gpus))
    return drive(program, ranks, *options, **more)


def drive_each(
    cases: Sequence[tuple],
    ranks: int,
    sabotage: str = "",
    timeout: float = SECONDS,
    cwd: Path | None = None,
    numba: bool = False,
) -> tuple[subprocess.CompletedProcess, list[tuple[int, str]]]:
    """Run drivers one after the other in the same processes, which saves their starts.

    Parameters
    ----------
    cases : sequence of (str, sequence, sequence[, int])
        Drivers, their options, more options on rank 1, and the number of ranks if not all.
    ranks, sabotage, timeout, cwd, numba
        As in `drive` and `launch`.

    Returns
    -------
    CompletedProcess
        Of all of them, which goes on whatever the exit codes are.
    list of (int, str)
        Of each the exit code, -1 if it was not said, and what was on stdout until then.
    """
    each = []
    for program, common, more, *few in cases:
        name, *words = [program] if isinstance(program, Path) else program.split()
        each.append((str(DRIVERS / name), [*words, *map(str, common)], [*more], *few))
    code = EACH.format("" if numba else NO_NUMBA, sabotage)
    done = launch(ranks, "-c", code, json.dumps(each), timeout=timeout, cwd=cwd)
    parts = re.split(r"^exit code (\d+)\n", done.stdout, flags=re.MULTILINE)
    found = [(int(code), text) for text, code in zip(parts[::2], parts[1::2])]
    return done, found + [(-1, "")] * (len(cases) - len(found))


def runs_on(method: str, layout: object, mask: object) -> bool:
    """Return True if a method can run on a layout with a mask."""
    from a2d_mpi.masks.mask import Causal
    from a2d_mpi.schedules.method import METHODS
    from a2d_mpi.sharding import triangle_shards

    if not METHODS[method].causal:
        return True
    ranks = layout.positions
    return isinstance(mask, Causal) and (ranks == 1 or triangle_shards.fits(ranks))


def assert_refused(done: subprocess.CompletedProcess, text: str) -> None:
    """Assert that a driver ended with exit code 2 and one line on stderr with the text."""
    assert done.returncode == 2, done.stderr
    assert_one_line_each(done, [text])


def assert_each_refused(
    cases: Sequence[tuple[str, Sequence[object], Sequence[str], str]], ranks: int
) -> None:
    """Assert that drivers refuse each case: (driver, options, more options on rank 1, message)."""
    done, found = drive_each([case[:3] for case in cases], ranks)
    assert_one_line_each(done, [text for *_, text in cases])
    wrong = [(case, code) for case, (code, _) in zip(cases, found) if code != 2]
    assert not wrong, f"not refused with exit code 2: {wrong}"


def assert_one_line_each(done: subprocess.CompletedProcess, texts: Sequence[str]) -> None:
    """Assert that drivers printed one line on stderr for each text."""
    messages = re.findall(r"^\w+\.py: error: .*$", done.stderr, re.MULTILINE)
    wrong = [(text, line) for text, line in zip_longest(texts, messages) if text not in str(line)]
    assert not wrong and len(messages) == len(texts), f"{wrong}\n{done.stderr}"
    assert "Traceback" not in done.stderr + done.stdout
