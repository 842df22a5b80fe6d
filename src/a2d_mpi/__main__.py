"""Exact two-dimensional parallel attention over MPI.

    mpiexec -n 4 python -m a2d_mpi attention --rows 2 --cols 2 --backward

commands; COMMAND --help lists their options:

  attention   attention on random tensors or those of a file: checked, then timed
  bench       methods, kernels, linear attention and models of transformers, side by side
  calibrate   measure this machine, and write its profile for the planner
  generate    text by a model of transformers, with the KV cache spread over the ranks
  plan        the fastest methods and grids for a machine, as predicted
  plot        figures and tables: results, grids of ranks, masks, schedules
  train       train a model of transformers, its sequence spread over the ranks

plan and plot run without MPI, in one process.  The script a2d-mpi is python -m a2d_mpi.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from a2d_mpi.cli import end_job_on_errors

if TYPE_CHECKING:
    from mpi4py import MPI

    from a2d_mpi.cli.options import Parser

COMMANDS = "attention", "bench", "calibrate", "generate", "plan", "plot", "train"
SERIAL = "plan", "plot"


def build_parser(name: str, prog: str | None = None, comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of a command, which has its `body`.

    Parameters
    ----------
    name : str
        One of `COMMANDS`; else the parser is the one that lists them.
    prog : str, optional
        What the user typed; default: the program in drivers/.
    comm : Intracomm, optional
        See `a2d_mpi.cli.options.Parser`.
    """
    from a2d_mpi.cli.options import Parser

    if name not in COMMANDS:
        parser = Parser(prog, __doc__, comm)
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see above")
        return parser
    prog, module = prog or f"{name}.py", import_module(f"a2d_mpi.commands.{name}")
    if hasattr(module, "COMMANDS"):
        from a2d_mpi.cli.subcommands import Commands

        return Commands(prog, module.__doc__, *module.COMMANDS, comm=comm, default=module.DEFAULT)
    parser = Parser(prog, module.__doc__, comm)
    parser.body = module.build(parser)
    return parser


def start(name: str, prog: str | None = None) -> NoReturn:
    """Run a command with the options of ``sys.argv``, and exit with its code; see `build_parser`.

    If mpi4py finds no MPI, the exit code is 2, with one line.
    """
    prog, comm = prog or f"{name}.py", None
    if name not in SERIAL:
        end_job_on_errors()  # before other imports: a module may be missing on one node
        try:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        except (ImportError, RuntimeError) as error:
            if name in COMMANDS:
                why = str(error).strip().rpartition("\n")[2]
                way = "pip install a2d_mpi[mpich], or let MPI4PY_LIBMPI name this machine's libmpi"
                print(f"{prog}: error: mpi4py found no MPI: {why}; {way}", file=sys.stderr)
                sys.exit(2)
    build = partial(build_parser, name, prog)
    if comm is None:
        from a2d_mpi.cli.subcommands import run_serial

        run_serial(build)
    from a2d_mpi.cli.run import run

    run(comm, build)


def main() -> NoReturn:
    """Run the command that the first argument names; without arguments list the commands."""
    typed, name, *options = [*sys.argv, "--help"][: max(2, len(sys.argv))]
    prog = Path(typed).name
    prog = "python -m a2d_mpi" if prog == "__main__.py" else prog
    if name in COMMANDS:
        prog = f"{prog} {name}"
        sys.argv = [prog, *options]  # as result files show it
    else:
        sys.argv = [prog, name]
    start(name, prog)


if __name__ == "__main__":
    main()
