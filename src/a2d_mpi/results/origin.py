"""The provenance of a result: versions, commit, command, MPI, hosts, device, files, time."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from threadpoolctl import threadpool_info

import a2d_mpi
from a2d_mpi.core.openblas import cpu_fields, first_cpu


def provenance(
    mpi_library: str, hostnames: Sequence[str], device: str | None = None
) -> dict[str, object]:
    """Return the provenance of a result: the arguments, and facts of this process.

    Returns
    -------
    dict
        * package_version, python_version, numpy_version, mpi4py_version;
        * numba_version: "none" if Numba is not installed;
        * git_commit of the package's source: with "-dirty" if it was changed, "unknown" without
          git;
        * command_line, mpi_library, hostnames;
        * device: default the name of the CPU;
        * blas: NumPy's BLAS, and the CPU that it detected;
        * utc_time: ISO 8601.
    """
    return {
        "package_version": a2d_mpi.__version__,
        "python_version": platform.python_version(),
        **{f"{name}_version": _version(name) for name in ("numpy", "mpi4py", "numba")},
        "git_commit": _git_commit(),
        "command_line": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}",
        "mpi_library": mpi_library,
        "hostnames": list(hostnames),
        "device": device or cpu_name(),
        "blas": blas_name(),
        "utc_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _version(package: str) -> str:
    """Return the version of a package from its metadata; importing Numba would take a second."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _git_commit() -> str:
    here = Path(__file__)
    git = ["git", "-C", here.parent]
    options = {"capture_output": True, "check": True, "text": True, "timeout": 1}
    try:
        # An installed copy may be inside a repository that does not track it.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], **options)
        describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run([*git, *describe], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def blas_name() -> str:
    """Return the BLAS libraries of this process, like "openblas 0.3.31 (Haswell)"."""
    libraries = [x for x in threadpool_info() if x["user_api"] == "blas"]
    named = (f"{x['internal_api']} {x['version']} ({x.get('architecture')})" for x in libraries)
    return ", ".join(sorted(set(named))) or "unknown"


def cpu_name() -> str:
    """Return the name of the CPU, with family and model: names of virtual CPUs say little."""
    fields = cpu_fields(first_cpu())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = [fields.get(x, "") for x in ("cpu family", "model")]
    return "{} (family {}, model {})".format(fields["model name"], *numbers)
