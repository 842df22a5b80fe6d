"""Options of all programs, their exit codes, and what they print; no MPI import."""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from tqdm import tqdm

from a2d_mpi import __version__
from a2d_mpi.core.config import DISTRIBUTIONS, LARGEST, TRANSFERS, WIRES
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.sizes import parse_count
from a2d_mpi.kernels import KERNELS
from a2d_mpi.masks.patterns import PATTERNS, parse_mask
from a2d_mpi.schedules.method import METHODS

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
log = logging.getLogger("a2d_mpi")  # what programs say beside their results
BAD_INPUT = 2  # exit code: nothing was computed, or nothing could be written
SAMPLE = 16  # query rows and key rows that --check sample compares
FAILED_CHECK = 1  # exit code: a result is wrong
LINES = 30.0  # s between lines of progress, where stderr is no terminal
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


class BadOption(ValueError, argparse.ArgumentTypeError):
    """An error in the text of an option; the parser shows its message unchanged."""


def number(
    kind: Callable[[str], T], what: str, least: T = 1, most: T = 1 << 31
) -> Callable[[str], T]:
    """Make a type of options: numbers from `least` to `most`."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:  # NaN is not
                return value
        raise BadOption(f"must be {what} from {least} to {most}, got {text[:40]!r}")

    return parse


whole = partial(number, int, "a whole number")
real = partial(number, float, "a number")
tokens = partial(number, parse_count, "a number of tokens (65536 or 64K)")


def form(what: str, pattern: str, make: Callable[..., T]) -> Callable[[str], T]:
    """Make a type of options: texts like `pattern`, of whose groups `make` makes the value."""

    def parse(text: str) -> T:
        if not (match := re.fullmatch(rf"\s*{pattern}\s*", text)):
            raise BadOption(f"must be {what}, got {text[:40]!r}")
        return make(*match.groups())

    return parse


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a type of options: a list of values of a type, with commas between them."""
    return lambda text: [kind(x.strip()) for x in text.split(",")]


def path(text: str) -> Path:
    """Parse an option that is a path; refuse an empty path, which is often an unset variable."""
    if not text:
        raise BadOption("must be a path, got ''")
    return Path(text)


def one_of(values: Collection[str]) -> Callable[[str], str]:
    """Make a type of options: one of `values`; in lists argparse's `choices` cannot check it."""

    def word(text: str) -> str:
        if text not in values:
            raise BadOption(f"must be one of {', '.join(values)}; got {text[:40]!r}")
        return text

    return word


def check_text(*others: str) -> Callable[[str], str]:
    """Make a type of options: sample, full or rows:N, or one of `others`."""
    words = *others, "sample", "full"
    return form(f"{', '.join(words)} or rows:N", rf"({'|'.join(words)}|rows:[1-9]\d{{0,8}})", str)


def checked_rows(text: str) -> int | None:
    """Return the number of rows that --check compares; None: all rows."""
    if text in ("sample", "full"):
        return SAMPLE if text == "sample" else None
    return int(text.removeprefix("rows:"))


# Numbers of slices, "4" or "2x4": in the forward and in the backward pass.
slices = form(
    "like 4 or 2x4",
    r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?",
    lambda forward, backward: (int(forward), int(backward or forward)),
)


def method_name(text: str) -> str:
    """Parse the name of a method in `METHODS`; underscores become blanks."""
    return one_of(METHODS)(text.replace("_", " ").strip())


def mask_text(text: str) -> str:
    """Check the text of a mask for `a2d_mpi.masks.patterns.make_mask`; return it without blanks.

    Raises
    ------
    BadOption
        If no mask has this name, or the mask does not take these arguments.
    """
    try:
        parse_mask(text)
    except ValueError as error:
        raise BadOption(str(error).removeprefix("mask ")) from None
    return text.strip()


def _imported(text: str) -> Path:
    """Run a file of --import, which few runs have."""
    from a2d_mpi.cli.user_files import import_file

    return import_file(path(text))


HEADS, HEADDIM = (whole(1, LARGEST[x]) for x in ("nheads", "headdim"))
SEED = whole(0, (1 << 63) - 1)  # as HDF5 keeps it

MASK_HELP = f"NAME[:ARGUMENTS], see docs/masks.md; NAME is one of {', '.join(PATTERNS)}"
CHECK_HELP = (
    f"rows to compare with float64: sample ({SAMPLE} query rows and {SAMPLE} key rows, and both "
    "ends; an error of a single other row is missed), rows:N (N of each), full (all)"
)
# fmt: off
# The options that several drivers have: each has one meaning and one spelling.
OPTIONS: dict[str, dict[str, object]] = {
    "output": {"type": path, "metavar": "FILE", "help": "HDF5 file for the results"},
    "resume": {"action": "store_true", "help": "run only what is missing in the file"},
    "profile": {"type": path, "metavar": "FILE",
                "help": "TOML profile of a machine: see data/machines and calibrate"},
    # The problem.
    "seqlen": {"type": tokens(), "metavar": "TOKENS", "help": "sequence length: 65536 or 64K"},
    "mask": {"type": mask_text, "metavar": "MASK", "default": "causal", "help": MASK_HELP},
    "nheads": {"type": HEADS, "metavar": "N", "help": "number of query heads"},
    "nheads-kv": {"type": HEADS, "metavar": "N", "help": "number of KV heads; default: --nheads"},
    "headdim": {"type": HEADDIM, "metavar": "N", "help": "elements of a head of q and k"},
    "headdim-v": {"type": HEADDIM, "metavar": "N",
                  "help": "elements of a head of v and out; default: --headdim"},
    "dtype": {"choices": DTYPES, "default": "float32", "help": "storage dtype"},
    "wire": {"choices": ("none", *WIRES), "default": "none",
             "help": "format of tensors in messages, see docs/wire.md; none: the storage dtype"},
    "backward": {"action": "store_true", "help": "also compute the gradients"},
    "survive": {"action": "store_true",
                "help": "continue without ranks that die; needs mpiexec --with-ft ulfm"},
    # Plans and grids.
    "method": {"type": method_name, "metavar": "METHOD", "default": next(iter(METHODS)),
               "help": f"one of {', '.join(METHODS)}; underscores may replace blanks"},
    "rows": {"type": whole(1), "metavar": "R",
             "help": "rows of the grid; default: those with the fewest bytes, predicted"},
    "cols": {"type": whole(1), "metavar": "C",
             "help": "columns of the grid; default: ranks / (--rows x --head-ranks)"},
    "head-ranks": {"type": whole(1), "metavar": "U", "default": 1,
                   "help": "ranks that share the heads"},
    "distribution": {"choices": DISTRIBUTIONS,
                     "help": "distribution of tokens over ranks; default: the one of the mask, or "
                             "the fastest one, as predicted"},
    "overlap": {"action": argparse.BooleanOptionalAction, "default": True,
                "help": "communicate while computing; --no-overlap: in turn"},
    # Measurement.
    "trials": {"type": whole(1, 10**6), "metavar": "N", "default": 5, "help": "timed runs"},
    "warmup": {"type": whole(0, 10**6), "metavar": "N", "default": 1,
               "help": "runs before the timed runs"},
    "check": {"type": check_text("none"), "metavar": "ROWS", "default": "sample",
              "help": CHECK_HELP},
    "seed": {"type": SEED, "metavar": "N", "default": 0, "help": "seed of all random numbers"},
    "device": {"choices": ("cpu", "gpu"), "default": "cpu",
               "help": "where to compute; ranks may share a GPU"},
    "kernel": {"choices": KERNELS, "default": "auto",
               "help": "auto: the fastest one for the device"},
    "transfers": {"choices": TRANSFERS, "default": "auto",
                  "help": "path of GPU arrays to MPI, see docs/gpus.md"},
    "threads": {"type": whole(1, 1024), "metavar": "N", "default": 1,  # no node has more cores
                "help": "BLAS threads per rank"},
}
# fmt: on


def add_options(to: argparse._ActionsContainer, *names: str, **changes: object) -> None:
    """Add some of `OPTIONS` to a parser or a group, with changes of their arguments."""
    for name in names:
        to.add_argument(f"--{name}", **{**OPTIONS[name], **changes})


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a plan runs on."""
    group = parser.add_argument_group("device")
    add_options(group, "device", "kernel", "transfers", "threads")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show docstrings as they are, and each option with its default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None or action.default is False:  # the help says what happens then
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only, and raises instead of exiting.

    Every program takes ``--import FILE``: it runs the user's file before it reads the other
    options, which may name what the file registers.  With ``--quiet`` it says less.

    Parameters
    ----------
    prog : str
        Name of the program.
    description : str
        Its docstring, which --help shows.
    comm : Intracomm, optional
        Without one (when only the options are asked for, or in programs of one process), every
        process speaks.
    **others
        Of `argparse.ArgumentParser`.
    """

    body: Callable[..., int] | None = None  # of the program, or of the chosen subcommand
    apart: Container[str] = ()  # options that may differ between ranks
    commands: Mapping[str, Parser] = MappingProxyType({})  # the parsers of its subcommands

    def __init__(
        self, prog: str, description: str, comm: MPI.Intracomm | None = None, **others: object
    ) -> None:
        self._comm = comm
        self._imports = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        self._imports.error = self.error
        text = "Python file to run first, which registers masks, methods or kernels of your own"
        self._imports.add_argument(
            "--import", type=_imported, action="append", metavar="FILE", help=text
        )
        text = "print results, warnings and errors, but neither progress nor remarks"
        self._imports.add_argument("--quiet", action="store_true", help=text)
        super().__init__(
            prog=prog,
            description=inspect.cleandoc(description),
            formatter_class=_Help,
            parents=[self._imports],
            **others,
        )
        version = f"%(prog)s of a2d_mpi {__version__}"
        self.add_argument("--version", action="version", version=version)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Run the files of --import, and parse the options."""
        namespace, others = self._imports.parse_known_args(args, namespace)
        common = dict(vars(namespace))
        _open_log(self.prog, namespace.quiet or (self._comm is not None and self._comm.rank != 0))
        parsed = super().parse_args(others, namespace)
        vars(parsed).update(common)  # a subcommand's parser sets its own defaults
        return parsed

    def _print_message(self, message: str, file=None) -> None:
        if self._comm is None or self._comm.rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError: whether the options are good is for all ranks to agree on."""
        message = re.sub(r"^argument (\S+): (?=must )", r"\1 ", message)  # as a sentence
        raise ValueError(f"{message} (see --help)")


def open_streams() -> None:
    """Print paths that are not UTF-8 with escapes."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
        stream.reconfigure(errors="backslashreplace")


def reason(error: Exception) -> str:
    """Return an error as one line for the user, with the name of its file if it has one."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _open_log(prog: str, quiet: bool) -> None:
    """Print the log on stderr, but with `quiet` only errors and, on other ranks, warnings."""
    log.handlers = [handler := logging.StreamHandler()]
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    log.setLevel(logging.WARNING if quiet else logging.INFO)


class _Lines(tqdm):
    """Progress in the log, a line every `LINES` seconds at most."""

    def __init__(self, items: Iterable | None = None, **options: object) -> None:
        form = "{desc}: {n_fmt} of {total_fmt} after {elapsed}, {remaining} left{postfix}"
        # With gui tqdm prints nothing itself.  It counts every item, so that each line is true.
        super().__init__(items, gui=True, bar_format=form, mininterval=0, miniters=1, **options)
        self._said = time.monotonic()

    def clear(self, *_: object, **__: object) -> None:
        """Leave the screen as it is, before other text is printed: there is no bar on it."""

    def display(self, *_: object, **__: object) -> None:
        """Add a line to the log if the last one is old enough."""
        if (now := time.monotonic()) >= self._said + LINES:
            self._said = now
            log.info("%s", self)


def progress(items: Iterable | None = None, rank: int = 0, **options: object) -> tqdm:
    """Show progress on the first rank: a bar if stderr is a terminal, or a line every half minute.

    The lines are in the log of the package.
    """
    kind = tqdm if sys.stderr is not None and sys.stderr.isatty() else _Lines
    quiet = rank != 0 or not log.isEnabledFor(logging.INFO)
    return kind(items, disable=quiet, leave=False, **options)


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Format a table with two blanks between columns; columns not in `left` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<' if i in left else '>'}{n}}}" for i, n in enumerate(widths))
    return "\n".join(line.format(*row).rstrip() for row in rows)
