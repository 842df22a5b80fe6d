"""What tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from a2d_mpi.check import error_bounds

MPIEXEC = Path(sys.executable).with_name("mpiexec")
# What Open MPI wants as root, and on fewer cores than ranks; see jobs/env.sh.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest |a - b| in float64; equal infinities are at distance 0, NaN is infinitely far."""
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
    """`error_bounds` of results from the whole q, k, v, dout and the float64 reference."""
    norms = {
        name: np.linalg.norm(x.astype(float), axis=-1).max(initial=0)
        for name, x in zip(("q", "k", "v", "dout"), inputs)
    }
    largest = {x: distance(np.where(np.isfinite(y), y, 0), 0) for x, y in exact.items()}
    return error_bounds(dtype, softmax_scale, norms, largest, same_precision)


def assert_all(comm: MPI.Intracomm, ok: bool, message: str) -> None:
    """Fail on all ranks of `comm` if `ok` is false on any, with the messages of those ranks.

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


def launch(
    ranks: int, *command: object, timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run a Python command on some ranks, with the MPI of this environment; 0: without mpiexec.

    Raises
    ------
    subprocess.TimeoutExpired
        After `timeout` seconds; all processes are gone then.
    """
    full = [MPIEXEC, "-n", ranks] * (ranks > 0) + [sys.executable, *command]
    with subprocess.Popen(
        [str(x) for x in full],
        cwd=cwd,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            # Killed at once, Open MPI's mpiexec would leave ranks behind.
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(full, process.returncode, stdout, stderr)
