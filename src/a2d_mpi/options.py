"""Options and exit codes of all programs; unlike `a2d_mpi.cli`, this needs no MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

BAD_INPUT = 2  # exit code: nothing was computed, or nothing could be written
FAILED_CHECK = 1  # exit code: a result is wrong


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only, and raises instead of exiting.

    Parameters
    ----------
    comm : Intracomm, optional
        Without one (when only the options are asked for, or in programs of one process), every
        process speaks.
    """

    def __init__(self, *args, comm: MPI.Intracomm | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._silent = comm is not None and comm.rank != 0

    def _print_message(self, message: str, file=None) -> None:
        if not self._silent:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError: whether the options are good is for all ranks to agree on."""
        raise ValueError(f"{message} (see --help)")


def run_serial(prog: str, body: Callable[[], int]) -> NoReturn:
    """Run the body of a program of one process and exit with its code; 2, with one line, if it
    raises ValueError or OSError.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # paths need not be UTF-8
    try:
        code = body()
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(code)
