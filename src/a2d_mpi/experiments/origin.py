"""The origin of a result: versions, commit, command, MPI, hosts, device, time."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import a2d_mpi


def provenance(
    mpi_library: str, hostnames: Sequence[str], device: str | None = None
) -> dict[str, object]:
    """Origin of a result: the arguments, and the facts that this process knows.

    Returns
    -------
    dict
        package_version, git_commit (of the package's source; "-dirty" if it was changed since,
        "unknown" without git), command_line, mpi_library, hostnames, device (default: the CPU's
        name), utc_time (ISO 8601).
    """
    return {
        "package_version": a2d_mpi.__version__,
        "git_commit": _git_commit(),
        "command_line": shlex.join(sys.argv),
        "mpi_library": mpi_library,
        "hostnames": list(hostnames),
        "device": device or _cpu_name(),
        "utc_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git_commit() -> str:
    here = Path(__file__)
    git = ["git", "-C", here.parent]
    options = {"capture_output": True, "check": True, "text": True, "timeout": 1}
    try:
        # An installed copy may lie within a repository that does not know it.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], **options)
        describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run([*git, *describe], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu_name() -> str:
    found = None
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
