"""Options and exit codes of all programs; no MPI import, unlike in `a2d_mpi.experiments.cli`."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from a2d_mpi.core.atomic import held, read_regular
from a2d_mpi.core.config import LARGEST
from a2d_mpi.experiments.files import check_files, files_written
from a2d_mpi.experiments.streams import lost_output, open_streams, reason
from a2d_mpi.masks.patterns import PATTERNS, parse_mask, split_masks
from a2d_mpi.schedules import METHODS

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
BAD_INPUT = 2  # exit code: nothing was computed, or nothing could be written
SAMPLE = 16  # query rows and key rows that --check sample compares
FAILED_CHECK = 1  # exit code: a result is wrong
METHOD_HELP = f"one of: {', '.join(METHODS)}; or with underscores"
ORDER_HELP = (
    "r (rows), c (columns) and u (ranks that share the heads) from the slowest to the fastest: "
    "along the last axis are neighbouring ranks, usually of one node"
)
MASK_HELP = f"NAME[:ARGUMENTS], see docs/masks.md; NAME is one of: {', '.join(PATTERNS)}"
MASK_FILE_HELP = "HDF5 file with begin and end, or cu_seqlens and causal: see docs/masks.md"
BLOCK_HELP = "rows and columns of a block of the grid whose ranks are neighbours: 2x2"


class BadOption(ValueError, argparse.ArgumentTypeError):
    """An error in the text of an option; the parser shows its message unchanged."""


def whole(least: int, most: int = 1 << 31) -> Callable[[str], int]:
    """Make a type of options: whole numbers from `least` to `most`."""
    return _bounded(int, "a whole number", least, most)


def real(least: float, most: float) -> Callable[[str], float]:
    """Make a type of options: numbers from `least` to `most`."""
    return _bounded(float, "a number", least, most)


def _bounded(kind: Callable[[str], T], what: str, least: T, most: T) -> Callable[[str], T]:
    def number(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise BadOption(f"must be {what}, got {text[:40]!r}") from None
        if not least <= value <= most:  # NaN is refused, too
            bound = f"at most {most}" if value > most else f"at least {least}"
            raise BadOption(f"must be {bound}, got {str(value)[:40]}")
        return value

    return number


def tokens(text: str) -> int:
    """A type of options: a number of tokens, "65536" or "64K"."""
    from a2d_mpi.planning.profile import parse_count

    try:
        count = parse_count(text.strip())
    except ValueError:
        raise BadOption(f"must be 1048576, 1024K or 1M tokens, got {text[:40]!r}") from None
    return SEQLEN(str(count))


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a type of options: a list of values of a type, with commas between them."""
    return lambda text: [kind(x.strip()) for x in text.split(",")]


def path(text: str) -> Path:
    """Parse an option that is a path; refuse an empty one, which is often an unset variable."""
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


def utf8(text: str) -> str:
    """Parse an option that is UTF-8 text; refuse bytes of other encodings."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadOption(f"must be UTF-8, got {text[:40]!r}") from None
    return text


def escaped(text: str) -> bytes:
    r"""Parse an option that is text with Python's escapes, such as \n; return bytes."""
    try:
        return text.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError:
        raise BadOption(f"must be text with Python's escapes, got {text[:40]!r}") from None


TRIALS, WARMUP = whole(1, 10**6), whole(0, 10**6)
THREADS = whole(1, 1024)  # of one rank: no node has more cores
SEED = whole(0, (1 << 63) - 1)  # as HDF5 keeps it
WIRE_HELP = "format of tensors in messages: bfloat16, mxfp8 or mxfp4, see docs/wire.md"
HEADDIM_V_HELP = "elements of a head of v and out; default: --headdim"
SEQLEN, HEADS, HEADDIM = (whole(1, LARGEST[x]) for x in ("seqlen", "nheads", "headdim"))


CHECK_HELP = (
    f"rows to compare with float64: sample ({SAMPLE} query rows and {SAMPLE} key rows, and both "
    "ends; an error of a single other row is missed), rows:N (N of each), full (all)"
)


def check_text(text: str, none: bool = True) -> str:
    """Parse an option that is sample, full or rows:N, or with `none` also none."""
    words = ("none",) * none + ("sample", "full")
    if text not in words and not re.fullmatch(r"rows:[1-9]\d{0,8}", text):
        raise BadOption(f"must be {', '.join(words)} or rows:N, got {text[:40]!r}")
    return text


def checked_rows(text: str) -> int | None:
    """Return the number of rows that --check compares; None: all rows."""
    if text in ("sample", "full"):
        return SAMPLE if text == "sample" else None
    return int(text.removeprefix("rows:"))


def block(text: str) -> tuple[int, int]:
    """Parse the rows and columns of a block: "2x3"."""
    match = re.fullmatch(r"\s*(\d{1,9})x(\d{1,9})\s*", text)
    if not match:
        raise BadOption(f"must be ROWSxCOLUMNS, got {text[:40]!r}")
    return int(match[1]), int(match[2])


def split(text: str) -> tuple[int, int]:
    """Parse the numbers of attention ranks and FFN ranks: "3+1"."""
    match = re.fullmatch(r"\s*(\d{1,9})\+(\d{1,9})\s*", text)
    if not match:
        raise BadOption(f"must be ATTENTION+FFN ranks, got {text[:40]!r}")
    return int(match[1]), int(match[2])


def method_name(text: str) -> str:
    """Parse the name of a method in `a2d_mpi.schedules.METHODS`; underscores become blanks.

    Raises
    ------
    BadOption
        If there is no method of this name.
    """
    name = text.replace("_", " ").strip()
    if name not in METHODS:
        raise BadOption(f"no method {text[:40]!r}: must be one of {', '.join(METHODS)}")
    return name


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


def masks(text: str) -> list[str]:
    """Parse texts of masks with commas between them; "all": one mask of each name."""
    texts = [mask_text(x) for x in split_masks(text)]
    if not texts:
        raise BadOption(f"must name a mask, got {text[:40]!r}")
    return texts


def import_file(text: str) -> str:
    """Run a user's Python file, once in a process, and return its name.

    Raises
    ------
    OSError
        If the file cannot be read, or is not a regular file.
    BadOption
        If the file raises an exception; the message has the line.
    """
    name = str(path(text))
    _run_file(name, read_regular(name))
    return name


@cache
def _run_file(name: str, source: bytes) -> None:
    module = ModuleType(f"imported {name}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, name, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        calls = traceback.extract_tb(error.__traceback__)
        lines = [x.lineno for x in calls if x.filename == name]
        line = lines[-1] if lines else getattr(error, "lineno", 1)  # a SyntaxError has a lineno
        what = str(error).partition("\n")[0]
        raise BadOption(f"{name}, line {line}: {type(error).__name__}: {what}") from None


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only, and raises instead of exiting.

    Every program takes ``--import FILE``: it runs the user's file before it reads the other
    options, which may name what the file registers.

    Parameters
    ----------
    prog : str
        Name of the program.
    doc : str
        Its docstring, of which --help shows the first paragraph.
    comm : Intracomm, optional
        Without one (when only the options are asked for, or in programs of one process), every
        process speaks.
    """

    def __init__(self, prog: str, doc: str, comm: MPI.Intracomm | None = None) -> None:
        self._imports = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        self._imports.error = self.error
        text = "run this Python file first, which registers masks, methods or kernels of your own"
        self._imports.add_argument(
            "--import", type=import_file, action="append", metavar="FILE", help=text
        )
        super().__init__(prog=prog, description=doc.split("\n\n")[0], parents=[self._imports])
        self._silent = comm is not None and comm.rank != 0

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Run the files of --import, and parse the options."""
        namespace, others = self._imports.parse_known_args(args, namespace)
        return super().parse_args(others, namespace)

    def _print_message(self, message: str, file=None) -> None:
        if not self._silent:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError: whether the options are good is for all ranks to agree on."""
        message = re.sub(r"^argument (\S+): (?=must )", r"\1 ", message)  # as a sentence
        raise ValueError(f"{message} (see --help)")


def add_trace(parser: Parser, what: str) -> None:
    """Add --trace."""
    text = f"JSON file for a timeline of all ranks, for Perfetto: {what}"
    parser.add_argument("--trace", type=path, metavar="FILE", help=text)


def add_mask(parser: Parser, default: str) -> None:
    """Add --mask and --mask-file, of which one may be given."""
    either = parser.add_mutually_exclusive_group()
    text = f"{MASK_HELP} (default {default})"
    either.add_argument("--mask", type=mask_text, default=default, help=text)
    either.add_argument("--mask-file", type=path, help=MASK_FILE_HELP)


def run_serial(
    build_parser: Callable[[], Parser], body: Callable[[argparse.Namespace], int]
) -> NoReturn:
    """Run a program of one process on its options and exit with its code; 2, with one line, if it
    raises ValueError, OSError or MemoryError.
    """
    open_streams()
    parser = build_parser()
    try:
        args = parser.parse_args()
        check_files(args)
        with ExitStack() as stack:
            for path in files_written(args):
                stack.enter_context(held(path))
            code = body(args)
    except (ValueError, OSError, MemoryError) as error:
        print(f"{parser.prog}: error: {reason(error)}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(BAD_INPUT if lost_output(parser.prog) else code)
