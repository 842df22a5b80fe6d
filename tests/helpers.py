"""What tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from mpi4py import MPI

MPIEXEC = Path(sys.executable).with_name("mpiexec")
# What Open MPI wants as root, and on fewer cores than ranks; see jobs/env.sh.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


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
