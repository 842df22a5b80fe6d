"""Programs of many ranks: start and end with one message, one exit code, no hang; their grids."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import NoReturn, TypeVar

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.cli.options import (
    BAD_INPUT,
    INTERRUPTED,
    Parser,
    add_options,
    form,
    open_streams,
    reason,
)
from a2d_mpi.comm.agreement import Call, CollectiveError, agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.survival import survives
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import leaves_open, problem_of

T = TypeVar("T")
IDLE = 0.002  # s of sleep between the polls of a rank that waits for another rank's long step
# Seconds between the aborts of two ranks.  If two ranks abort at once after a death, the launcher
# of Open MPI 5.0.11 with ULFM may hang, or end with exit code 0.  This happened in 10 of 36 jobs
# of three ranks, and in none of 42 jobs with this pause.
STAGGER = 0.1
# Seconds in which the launcher reads what was printed before it hears of an abort.  Without them
# two tests lost their message on two busy cores.
READING = 0.3
LEAVING = 1.0  # most seconds that a rank waits at the end for others, some of which may have died
PATIENCE = 10.0  # s after a CollectiveError in which all other ranks must come to their end


def together(comm: MPI.Intracomm, step: Callable[[], T], on: int | None = None) -> T | None:
    """Run `step` on all ranks, or on rank `on` only; if it fails on any rank, fail on all.

    Collective over `comm`; `step` itself must not communicate.

    Raises
    ------
    CollectiveError
        On all ranks, with the message of the first rank whose `step` raised ValueError, OSError
        or MemoryError.
    """
    call, value = Call(comm), None
    with call.checks((ValueError, OSError, MemoryError), reason):
        if on is None or comm.rank == on:
            value = step()
    if on is not None:
        _wait_idly(comm.Ibarrier())
    call.agree()
    return value


def _wait_idly(arrived: MPI.Request, seconds: float = math.inf) -> bool:
    """Wait for a message, asleep: a rank that works for minutes may share the core.

    Return False if the message has not arrived after `seconds`.
    """
    end = time.monotonic() + seconds
    while not arrived.Test():
        if time.monotonic() > end:
            return False
        time.sleep(IDLE)
    return True


def arguments(comm: MPI.Intracomm, parser: Parser) -> argparse.Namespace:
    """Parse the options of a program on all ranks, and check that they are the same.

    Collective over `comm`.  Options in `parser.apart` may differ between ranks.  Other differences
    would make ranks take different branches.

    Raises
    ------
    CollectiveError
        On all ranks, if an option is wrong on any rank, or options differ.
    SystemExit
        On all ranks, after --help.
    """

    def parse() -> dict[str, object]:
        try:
            return vars(parser.parse_args())
        except SystemExit:  # --help or --version is printed
            return {}

    given = together(comm, parse)
    same = {f"--{x.replace('_', '-')}": y for x, y in given.items() if x not in parser.apart}
    agree(comm, None, {"--help": not given, **same})
    if not given:
        raise SystemExit(0)
    return argparse.Namespace(**given)


def run(comm: MPI.Intracomm, build_parser: Callable[[MPI.Intracomm], Parser]) -> NoReturn:
    """Run a program, or its subcommand, with its options, and exit with its code on all ranks.

    BLAS gets the threads of --threads.  A CollectiveError is printed once, on rank 0, and the exit
    code is 2.  Any other exception, and Ctrl-C, may have happened on one rank only.  Its
    traceback, or a line after Ctrl-C, is printed and the whole job is aborted, so that no rank
    waits for this one.  The job is also aborted if only a part of the ranks raise a
    CollectiveError, for example the ranks of a smaller grid.  If MPI continues when ranks die, a
    rank that dies after the body has ended changes nothing.
    """
    open_streams()
    parser = build_parser(comm=comm)
    prog = parser.prog
    ends, problem = comm.Dup(), None  # other ranks may still use `comm` when this rank ends

    def abort(code: int) -> NoReturn:
        sys.stderr.flush()
        time.sleep(READING)
        if survives():  # after a death all ranks come here, and the first Abort ends them all
            time.sleep(STAGGER * min(comm.rank, 30))
        comm.Abort(code)
        os._exit(code)  # the call may return where another rank has aborted, too

    try:
        args = arguments(comm, parser)
        with threadpool_limits(getattr(args, "threads", None)):  # None: no limit
            code = parser.body(comm, args)
    except SystemExit as end:  # --help, on all ranks
        code = end.code
    except CollectiveError as error:
        code, problem = BAD_INPUT, error
        if comm.rank == 0:
            print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        ended, code = ("interrupted", INTERRUPTED) if interrupted else ("failed", 70)
        print(f"{prog}: rank {comm.rank} {ended}", file=sys.stderr)
        if not interrupted:
            traceback.print_exc()
        abort(code)
    _leave(ends, prog, code, problem, abort)


def _leave(
    ends: MPI.Intracomm,
    prog: str,
    code: int,
    problem: CollectiveError | None,
    abort: Callable[[int], NoReturn],
) -> NoReturn:
    """Agree with all ranks of `ends` that the program is over, and exit; see `run`."""
    print(end="", flush=True)
    # A launcher that sees an exit code ends the other ranks: first the message must be printed.
    # If ranks may have died, the agreement takes the bitwise and of all complements of codes: the
    # complement of their bitwise or.
    codes = np.array([~code], np.intc)
    with suppress(MPI.Exception) if survives() else nullcontext():
        arrived = ends.Iagree(codes) if survives() else ends.Ibarrier()
        if not _wait_idly(arrived, PATIENCE if problem else math.inf):
            print(f"{prog}: rank {ends.rank} failed, others did not: {problem}", file=sys.stderr)
            abort(code)
    if survives():
        with suppress(MPI.Exception):  # first all ranks hear of the agreement
            _wait_idly(ends.Ibarrier(), LEAVING)
        sys.stderr.flush()
        # If a rank dies now, MPI_Finalize may wait for good (Open MPI 5.0.11).
        os._exit(int(~codes[0]))
    sys.exit(ends.allreduce(code, MPI.BOR))


def add_grid(parser: Parser) -> argparse._ArgumentGroup:
    """Add the options of a method and its grid; see `open_grid`.  Returns their group."""
    group = parser.add_argument_group("method and grid of ranks")
    add_options(group, "method", "rows", "cols", "head-ranks")
    text = (
        "the axes r (rows), c (columns) and u (ranks that share the heads) from the slowest to "
        "the fastest: ranks along the last axis are neighbours, usually on a node"
    )
    group.add_argument("--order", metavar="AXES", default="rcu", help=text)
    block = form("ROWSxCOLUMNS", r"(\d{1,9})x(\d{1,9})", lambda *x: tuple(map(int, x)))
    text = "rows and columns of a block of the grid whose ranks are neighbours"
    group.add_argument("--rank-block", type=block, metavar="RxC", default="1x1", help=text)
    text = "TOML profile of this machine: take the fastest grid for it"
    add_options(group, "profile", help=text)
    return group


def least_bytes(
    comm: MPI.Intracomm,
    method: str,
    work: Workload,
    heads: int = 1,
    distribution: str | None = None,
) -> tuple[int, int]:
    """Return rows and columns of the grid whose ranks receive the least, by prediction.

    Each rank counts the bytes of its own programs, and the rank that receives most counts.  Of
    equal grids, as those of a ring are, the squarest is taken.  Collective over `comm`.
    """
    from a2d_mpi.planning.cost import moves

    group, found = max(1, comm.size // heads), []
    for rows in (x for x in range(1, group + 1) if group % x == 0):
        layout, received = Layout(rows, group // rows, heads), math.inf
        with suppress(ValueError):  # what fits no grid is refused when the plan is made
            if METHODS[method].suits(layout):
                if distribution is None and leaves_open(method, layout, work, work.mask):
                    distribution = (
                        "zigzag"  # the search for a better one takes minutes on 512 ranks
                    )
                problem = problem_of(method, layout, work, work.seen, distribution)
                moved = moves(method, layout, problem, comm.rank, work.phases)
                received = sum(x.nbytes for x in moved if not x.sent)
        found.append((comm.allreduce(received, MPI.MAX), abs(rows - layout.cols), layout))
    layout = min(found, key=lambda x: x[:2])[2]
    return layout.rows, layout.cols


def open_grid(comm: MPI.Intracomm, args: argparse.Namespace, work: Workload) -> ProcessGrid:
    """Make the grid of the options of `add_grid`; the grid refuses sizes that do not fit."""
    given = args.rows, args.cols, args.head_ranks, args.order, args.rank_block
    if args.profile:
        from a2d_mpi.planning.planner import best_candidate
        from a2d_mpi.planning.profile import read_machine

        def choose() -> Layout:
            if given != (None, None, 1, "rcu", (1, 1)):
                raise ValueError(
                    "--profile chooses --rows, --cols, --head-ranks, --order and --rank-block: "
                    "leave these out"
                )
            machine = read_machine(args.profile)
            return best_candidate(machine, comm.size, work, methods=(args.method,)).layout

        return ProcessGrid.from_layout(comm, comm.bcast(together(comm, choose, on=0)))
    rows, cols, heads, *order = given
    if (rows, cols) == (None, None):
        distribution = getattr(args, "distribution", None)
        rows, cols = least_bytes(comm, args.method, work, heads, distribution)
    group = max(1, comm.size // heads)
    rows, cols = rows or max(1, group // cols), cols or max(1, group // rows)
    grid = ProcessGrid(comm, rows, cols, heads, *order)
    if getattr(args, "import"):
        from a2d_mpi.cli.workloads import check_ends

        together(comm, lambda: check_ends(args.method, grid.layout, work), on=0)
    return grid
