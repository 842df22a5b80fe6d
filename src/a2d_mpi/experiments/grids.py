"""The options of a method and its grid, and the making of grids."""

from __future__ import annotations

import argparse

from mpi4py import MPI

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import Layout, squarest
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.options import Parser, add_options, pair
from a2d_mpi.planning.workload import Workload


def add_grid(parser: Parser) -> argparse._ArgumentGroup:
    """Add the options of a method and its grid; see `open_grid`.  Returns their group."""
    group = parser.add_argument_group("method and grid of ranks")
    add_options(group, "method", "rows", "cols", "head-ranks")
    text = (
        "the axes r (rows), c (columns) and u (ranks that share the heads) from the slowest to "
        "the fastest: ranks along the last axis are neighbours, usually on a node"
    )
    group.add_argument("--order", metavar="AXES", default="rcu", help=text)
    block = pair("x", "ROWSxCOLUMNS")
    text = "rows and columns of a block of the grid whose ranks are neighbours"
    group.add_argument("--rank-block", type=block, metavar="RxC", default="1x1", help=text)
    text = "TOML profile of this machine: take the fastest grid for it"
    add_options(group, "profile", help=text)
    return group


def grid_shape(
    ranks: int, rows: int | None = None, cols: int | None = None, heads: int = 1
) -> tuple[int, int]:
    """Return rows and columns of a grid; default: as square as the ranks allow.

    The grid refuses sizes that do not fit the ranks.
    """
    group = max(1, ranks // heads)
    if rows is None and cols is None:
        return squarest(group)
    return rows or max(1, group // cols), cols or max(1, group // rows)


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
    return ProcessGrid(comm, *grid_shape(comm.size, rows, cols, heads), heads, *order)
