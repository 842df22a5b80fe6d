"""The files that drivers read and write, and a check that no output overwrites an input."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from a2d_mpi.core.atomic import same_file

# Options of drivers that name files to read and files to write; some name folders or lists.
READ = (
    "input",
    "mask_file",
    "profile",
    "text",
    "model",
    "checkpoint",
    "results",
    "files",
    "import",
)
WRITTEN = ("output", "picture", "trace")


def files_read(args: argparse.Namespace) -> list[str]:
    """Return all files that a driver reads, by its options; of a folder all files in it."""
    paths: list[str] = []
    for name in READ:
        given = getattr(args, name, None) or ()
        for path in given if isinstance(given, list) else [given] if given else []:
            inside = list(Path(path).iterdir()) if os.path.isdir(path) else []
            paths += [os.fspath(path), *map(os.fspath, inside)]
    return paths


def files_written(args: argparse.Namespace) -> list[str]:
    """All files that a driver writes, by its options, but those that it writes into a folder."""
    return [os.fspath(x) for name in WRITTEN if (x := getattr(args, name, None))]


def check_files(args: argparse.Namespace) -> None:
    """Check before the work that no output is the same file as an input or another output.

    Raises
    ------
    OSError
        If an output is an input or another output.
    """
    written = files_written(args)
    read = files_read(args) if written else []
    for i, path in enumerate(written):
        others = [*((x, "input") for x in read), *((x, "output") for x in written[:i])]
        for other, what in others:
            if same_file(path, other):
                raise OSError(f"cannot write {path}: it is the {what} {other}")
