"""Programs with subcommands, and programs of one process; no MPI import."""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from a2d_mpi.cli.options import (
    BAD_INPUT,
    INTERRUPTED,
    Parser,
    open_streams,
    reason,
)

if TYPE_CHECKING:
    from mpi4py import MPI


class Commands(Parser):
    """A parser of a program with subcommands, one for each of `builders`.

    A builder adds options to a parser and returns the body that they are for.  Its name is the
    subcommand, and its docstring is the help.  It is called only if its subcommand is needed, and
    then imports what this needs.  The subcommand that the user chose, or the default, is `command`
    of the parsed options.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *builders: Callable[[Parser], Callable[..., int]],
        comm: MPI.Intracomm | None = None,
        default: str | None = None,
    ) -> None:
        super().__init__(prog, description, comm)
        self._default = default
        text = "one of the following; COMMAND --help lists its options"
        self._added = self.add_subparsers(
            dest="command", metavar="COMMAND", required=True, title="commands",
            help=text + f"; default: {default}" * bool(default), parser_class=Parser,
        )  # fmt: skip
        for build in builders:
            doc = inspect.getdoc(build)
            first = doc.partition("\n")[0]
            new = self._added.add_parser(build.__name__, description=doc, help=first, comm=comm)
            new.build = build

    def command(self, name: str) -> Parser:
        """Return the parser of a subcommand."""
        new = self._added.choices[name]
        new.body = new.body or new.build(new)
        return new

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of all subcommands, by name."""
        return {name: self.command(name) for name in self._added.choices}

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options of the subcommand that comes first, or of the default."""
        names = self._added.choices
        if self._default and args[:1] not in [[x] for x in (*names, "-h", "--help", "--version")]:
            args = [self._default, *args]
        if args[:1] and args[0] in names:
            self.body = self.command(args[0]).body
        return super().parse_known_args(args, namespace)


def run_serial(build_parser: Callable[[], Parser]) -> NoReturn:
    """Run a program of one process, or its subcommand, on its options and exit with its code.

    It is 2, with one line, if the program raises ValueError, OSError or MemoryError, and 130 after
    Ctrl-C.  A reader that stops, such as `| head -1`, ends the program.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    open_streams()
    parser = build_parser()
    try:
        args = parser.parse_args()
        code = parser.body(args)
    except (ValueError, OSError, MemoryError) as error:
        print(f"{parser.prog}: error: {reason(error)}", file=sys.stderr)
        code = BAD_INPUT
    except SystemExit as end:  # --help or --version is printed
        code = end.code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
