"""Files of users: masks in HDF5, prompts, and Python files of --import with what plans take."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import ArgumentTypeError, Namespace
from functools import cache
from pathlib import Path
from types import ModuleType

import h5py

from a2d_mpi.core.atomic import read_regular
from a2d_mpi.core.sizes import check_range
from a2d_mpi.experiments.hdf5 import member, plain, reading
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.documents import Documents

MASK_SCHEMA = ("a2d_mpi mask", 1)


def import_file(path: Path) -> Path:
    """Run a user's Python file, once in a process, and return its path.

    Raises
    ------
    OSError
        If the file cannot be read, or is not a regular file.
    ArgumentTypeError
        If the file raises an exception; the message has the line.
    """
    _run_file(str(path), read_regular(path))
    return path


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
        raise ArgumentTypeError(f"{name}, line {line}: {type(error).__name__}: {what}") from None


def read_mask(path: str | os.PathLike[str], seqlen: int) -> IntervalMask | Documents:
    """Read the mask of `seqlen` queries and keys.  Many processes may read at the same time.

    The file::

        /begin, /end   (seqlen,) or (m, seqlen) integers: query i sees the keys [begin[i], end[i]);
                       with m rows it has m intervals.  An interval is empty if end <= begin.
        or
        /cu_seqlens    (documents + 1,) integers: first token of each packed document, and the end
        /              attribute causal, true or false: whether documents are causal

    The attributes schema ("a2d_mpi mask") and schema_version (1) are optional.

    Raises
    ------
    OSError
        If the file is missing, unreadable, not HDF5 or cut short, or its numbers are elsewhere.
    ValueError
        If datasets are missing, have a wrong type or shape, or do not fit the sequence.
    """
    with reading(path, MASK_SCHEMA, needs_schema=False) as file:
        members = {name: member(file, name) for name in ("begin", "end", "cu_seqlens")}
        datasets = {name: x[()] for name, x in members.items() if isinstance(x, h5py.Dataset)}
        attributes = plain(file.attrs)
    try:
        if list(datasets) == ["cu_seqlens"]:
            if (causal := attributes.get("causal")) not in (False, True):  # 0 and 1 count, too
                shown = "got none" if causal is None else f"got {causal!r}"
                raise ValueError(f"cu_seqlens needs the attribute causal, true or false, {shown}")
            mask = Documents(**datasets, causal=bool(causal))
            mask.check(seqlen)
        elif list(datasets) == ["begin", "end"]:
            mask = IntervalMask(**datasets)
            mask.check(seqlen)
            check_range(seqlen, **datasets)
        else:
            names = " and ".join(datasets) or "none of them"
            raise ValueError(f"must have datasets begin and end, or cu_seqlens, got {names}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return mask


def texts_of(args: Namespace) -> list[bytes]:
    """Return the prompts of files, and then those of --prompt; ValueError if one is empty."""
    texts = [(str(x), x.read_bytes()) for x in args.prompt_file]
    texts += [("--prompt", x.encode(errors="surrogateescape")) for x in args.prompt]
    if not texts:
        raise ValueError("give --prompt or --prompt-file")
    for name, text in texts:
        if not text:
            raise ValueError(f"{name} must not be empty")
    return [text for _, text in texts]
