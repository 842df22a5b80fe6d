"""Options, and the start and the end of programs; models and texts by name."""

import sys
from types import TracebackType

_print_error = sys.excepthook


def end_job_on_errors() -> None:
    """Let an uncaught error end a job of many ranks, as ``python -m mpi4py`` does.

    Otherwise the rank would wait in MPI_Finalize, and the other ranks would wait for this rank.
    Drivers call this before their imports: a module may be missing on one node.
    `a2d_mpi.cli.run.run` catches later errors.
    """
    sys.excepthook = _end_job


def _end_job(kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error, and abort the job when Python ends."""
    _print_error(kind, error, trace)
    if "mpi4py.MPI" in sys.modules:
        from mpi4py.run import set_abort_status

        set_abort_status(error)
