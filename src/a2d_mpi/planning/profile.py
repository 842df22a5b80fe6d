"""Profiles of machines: their links, kernels and memory as TOML, read and written.

A profile holds numbers in SI units.  ``drivers/calibrate.py`` measured them, or they are quoted::

    name = "two nodes"
    ranks_per_node = 4
    cores_per_node = 4            # cores (or GPUs) that the ranks of a node share
    memory = "80GB"               # of one rank; without it plans have no limit of memory
    reserved = "4GB"              # part of the memory that the runtime, kernels and MPI take
    start = 2e-5                  # s until all ranks have started a phase
    step = 1e-4                   # s of a core for each kernel call: Python, cold caches
    hop_overhead = 1e-4           # s of a core for each hop of a ring
    copy = 1e10                   # bytes/s of copies, sums and zeros, by one core
    merge = 2e9                   # bytes/s of partial outs that one core merges
    computed_by = "float32: numba, bfloat16: onednn; openblas 0.3.31 (Haswell); 1 thread"

    [link.inside]                 # between ranks of a node
    latency = 2e-6                # s until the shortest message arrives
    overhead = 1e-6               # s that the sender and the receiver each spend on a message
    bandwidth = 5e9               # bytes/s of one rank, each way
    hidden = 0.9                  # share of a transfer that needs no core of its receiver

    [link.between]                # between nodes; bandwidth is the bandwidth of one NIC
    nics = 1                      # NICs of a node, shared by its ranks

    [kernel.float32.forward]      # see KernelModel; likewise backward, and other dtypes
    flops = 95e9

A profile may leave out a link that was not measured, if the ranks do not need it.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from a2d_mpi.core.atomic import read_regular, write_whole
from a2d_mpi.core.config import PHASES
from a2d_mpi.planning.machine import KernelModel, Link, Machine

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

_SUFFIXES = {"": 1} | {
    prefix + i: (1024 if i else 1000) ** power
    for power, prefix in enumerate("KMGT", 1)
    for i in ("", "i")
}


def read_machine(path: str | Path) -> Machine:
    """Read a profile.

    Raises
    ------
    ValueError
        If the file is not TOML, or a key is missing, unknown, of the wrong type or out of bounds.
        The message names the key.
    OSError
        If the file cannot be read.
    """
    try:
        data = tomllib.loads(read_regular(path).decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError too
        raise ValueError(f"cannot read {path} as a TOML profile: {error}") from error
    try:
        return _machine(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _machine(data: dict[str, Any]) -> Machine:
    links, kernels = data.pop("link", {}), data.pop("kernel", {})
    for name in {"memory", "reserved"} & data.keys():
        data[name] = parse_size(data[name], name)
    for dtype, by_phase in kernels.items():
        if set(by_phase) != set(PHASES):
            raise ValueError(f"kernel.{dtype} must have the tables forward and backward only")
        kernels[dtype] = {
            phase: _made(KernelModel, x, f"kernel.{dtype}.{phase}.")
            for phase, x in by_phase.items()
        }
    given = {name: _made(Link, x, f"link.{name}.") for name, x in links.items()}
    nothing = {"inside": None, "between": None}
    return _made(Machine, nothing | data | given | {"kernels": kernels}, "")


def to_toml(machine: Machine, comment: str = "") -> str:
    """Return the profile as text that `read_machine` reads back.

    Each line of `comment` becomes a TOML comment.
    """
    lines = [f"# {line}".rstrip() for line in comment.split("\n") if comment]
    skip = {"inside", "between", "kernels"}
    if not machine.computed_by:
        skip.add("computed_by")
    top = {f.name: getattr(machine, f.name) for f in fields(machine) if f.name not in skip}
    lines += _lines(top)
    for name in ("inside", "between"):
        if link := getattr(machine, name):
            lines += ["", f"[link.{name}]", *_lines(vars(link))]
    for dtype, by_phase in machine.kernels.items():
        for phase, kernel in by_phase.items():
            lines += ["", f"[kernel.{dtype}.{phase}]", *_lines(vars(kernel))]
    return "\n".join(lines) + "\n"


def write_machine(path: str | os.PathLike[str], machine: Machine, comment: str = "") -> None:
    """Write a profile.  If writing fails, an older file is left as it was.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    write_whole(path, to_toml(machine, comment).encode())


def parse_size(text: str | float, name: str = "") -> int:
    """Return the bytes of "80GB" (80e9), "80GiB" (80 * 2**30), "4e9" or a number.

    Raises
    ------
    ValueError
        If the text is none of these, negative or infinite.  The message begins with `name`.
    """
    match = re.fullmatch(r"\s*([\d.]+(?:[eE]\+?\d+)?)\s*([KMGT]?i?)B?\s*", str(text))
    try:
        return round(float(match[1]) * _SUFFIXES[match[2]])
    except (TypeError, ValueError, KeyError, OverflowError):
        where = f"{name}: " if name else ""
        raise ValueError(f"{where}{text!r} is not a size; write 80GB or 80GiB") from None


def _made(kind: type, values: dict[str, Any], where: str) -> Any:
    """Make a dataclass from a TOML table, whose name `where` begins the message of an error."""
    known = [f.name for f in fields(kind)]
    if unknown := values.keys() - set(known):
        raise ValueError(f"unknown {where}{min(unknown)}; known are {', '.join(known)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{error}") from error


def _lines(values: dict[str, object]) -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, str):
            quoted = json.dumps(value, ensure_ascii=False)  # TOML has JSON's escapes
            lines.append(f"{name} = {quoted}")
        elif isinstance(value, int):
            lines.append(f"{name} = {value}")
        elif isinstance(value, float) and value < math.inf:
            lines.append(f"{name} = {value:.4g}")
    return lines
