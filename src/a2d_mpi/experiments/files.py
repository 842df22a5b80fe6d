"""The files that drivers read and write: no output takes the place of an input."""

from __future__ import annotations

import argparse
import os
import re
from itertools import product
from pathlib import Path

from a2d_mpi.core.atomic import same_file

# Options of all drivers that name files to read, and files to write; some name folders or lists.
READ = (
    *("input", "mask_file", "profile", "text", "model", "checkpoint", "prompts"),
    *("results", "files", "benchmark", "machines", "import"),
)
WRITTEN = ("output", "picture")
CHECKPOINTS = "folder"  # read and written
CHECKPOINT = re.compile(r"step-(\d{9})\.h5")


def files_read(args: argparse.Namespace, virtual: bool = True) -> list[str]:
    """All files that a driver reads, by its options.

    Of a folder all that is in it; of an HDF5 file also the sources of its `virtual` datasets, to
    find which takes long where there are thousands; beside a benchmark the profile of its name.
    """
    from a2d_mpi.experiments.hdf5 import sources

    found: list[str] = []
    for name in READ:
        given = getattr(args, name, None) or ()
        for path in given if isinstance(given, list) else [given] if given else []:
            inside = list(Path(path).iterdir()) if os.path.isdir(path) else []
            found += [os.fspath(path), *map(os.fspath, inside)]
            found += sources(path) if virtual else []
            if name == "benchmark":
                found.append(os.fspath(Path(path).with_suffix(".toml")))
    return found


def files_held(args: argparse.Namespace) -> list[str]:
    """The files that a driver keeps other jobs from writing: its outputs that are no folder."""
    if _draws_into_a_folder(args):
        return []
    return [os.fspath(x) for name in WRITTEN if (x := getattr(args, name, None))]


def files_written(args: argparse.Namespace) -> list[str]:
    """All files that a driver writes, by its options, but checkpoints."""
    if not _draws_into_a_folder(args):
        return files_held(args)
    names = ([x.strip() for x in text.split(",")] for text in (args.what, args.format))
    return [os.path.join(args.output, f"{name}.{kind}") for name, kind in product(*names)]


def check_files(args: argparse.Namespace) -> None:
    """Check before the work that no file that is written is one that is read, by any path.

    Raises
    ------
    OSError
        If an output is an input or another output, or one of them has the name of a checkpoint.
    """
    import h5py

    written, folder = files_written(args), getattr(args, CHECKPOINTS, None)
    if not written and not folder:
        return
    # What is no HDF5 file holds no numbers of one.
    read = files_read(args, any(os.path.isfile(x) and h5py.is_hdf5(x) for x in written))
    for i, path in enumerate(written):
        others = [*((x, "input") for x in read), *((x, "output") for x in written[:i])]
        for other, what in others:
            if same_file(path, other):
                raise OSError(f"cannot write {path}: it is the {what} {other}")
    for path in (*written, *read) if folder else ():
        real = Path(os.path.realpath(path))
        if CHECKPOINT.match(real.name) and real.parent == Path(os.path.realpath(folder)):
            raise OSError(f"{path} has the name of a checkpoint in the folder of checkpoints")


def _draws_into_a_folder(args: argparse.Namespace) -> bool:
    return hasattr(args, "what") and hasattr(args, "format")
