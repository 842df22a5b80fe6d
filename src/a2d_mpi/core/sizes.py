"""Sizes of memory, grids and problems; the division of heads; whole numbers."""

from __future__ import annotations

import math
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np

# MPI counts are ints, and some transports fail beyond 2 GiB: larger tensors are sent in pieces.
MAX_MESSAGE = 1 << 30  # bytes


def next_ranks(rank: int, size: int) -> list[int]:
    """Return the other ranks, from the next one on: so ranks do not all send to rank 0 first."""
    return [(rank + i) % size for i in range(1, size)]


def squarest(ranks: int) -> tuple[int, int]:
    """Return rows and columns of the most nearly square grid of `ranks`; rows <= columns."""
    rows = next(r for r in range(math.isqrt(ranks), 0, -1) if ranks % r == 0)
    return rows, ranks // rows


def whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return an integer as int; raise ValueError unless it is from `least` to `most`."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        kind = "a positive integer" if least == 1 else f"a whole number of at least {least}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def memory_limits() -> dict[str, tuple[int, bool]]:
    """Return the memory that this process may use, by what limits it.

    Returns
    -------
    dict of str to (int, bool)
        Bytes, and whether all processes of the node share them: its memory, the limits of the
        control groups of this process, those of SLURM and of its address space.
    """
    found = {"its node has": (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), True)}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2, version 1
            top, name = Path("/sys/fs/cgroup"), "memory.max"
            if controllers:
                top, name = top / controllers, "memory.limit_in_bytes"
            # The groups above it limit it, too.  Without a limit, version 1 has a huge number.
            texts = (
                _read(x / name).strip() for x in (top / group[1:], *(top / group[1:]).parents)
            )
            if limits := [int(x) for x in texts if x.isdecimal()]:
                found[f"its control group {group} allows"] = min(limits), True
    if (text := os.environ.get("SLURM_MEM_PER_NODE", "")).isdecimal() and int(text):
        found["SLURM_MEM_PER_NODE allows"] = int(text) << 20, True
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        found["the limit of its address space (ulimit -v) is"] = limit, False
    return found


def _read(path: str | Path) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def check_memory(what: str, nbytes: int, sharing: int = 1) -> None:
    """Refuse a problem that cannot fit, before anything is allocated for it.

    Parameters
    ----------
    what : str
        Name of the arrays, in the plural, for the message.
    nbytes : int
        Bytes of the arrays on one rank.
    sharing : int
        Number of ranks that share the memory of the node.  Each needs `nbytes`.

    Raises
    ------
    ValueError
        If one of `memory_limits` is smaller.
    """
    for limit, (memory, shared) in memory_limits().items():
        ranks = sharing if shared else 1
        if nbytes * ranks > memory:
            each = f" for {ranks} ranks" * (ranks > 1)
            raise ValueError(
                f"{what} take {nbytes / 2**30:.4g} GiB, but {limit} {memory / 2**30:.4g} GiB{each}"
            )


def misfit(nheads: int, nheads_kv: int, heads: int) -> str | None:
    """Return the reason why `heads` ranks cannot share the heads; None if they can."""
    group = nheads // nheads_kv
    if nheads % heads:
        return f"{heads} does not divide {nheads} heads"
    own = nheads // heads
    if own % group and group % own:
        return (
            f"a rank has {own} of {nheads} heads, and {group} heads share a KV head: neither of "
            f"{own} and {group} divides the other"
        )
    return None


def flops(
    area: int, nheads: int, headdim: int, backward: bool = False, headdim_v: int | None = None
) -> int:
    """Return the floating-point operations of attention over `area` visible pairs.

    Each pair and head takes two products forward and five backward.  The products for the logits,
    dq and dk take 2 headdim operations each.  The products for out, dv and the gradient of the
    probabilities take 2 headdim_v operations each.  Exponentials are not counted.

    Parameters
    ----------
    area : int
        Visible (query, key) pairs.
    nheads, headdim : int
        Query heads, and elements of a head.
    backward : bool
    headdim_v : int, optional
        Elements of a head of v.  Default: headdim.
    """
    values = headdim if headdim_v is None else headdim_v
    products = 3 * headdim + 2 * values if backward else headdim + values
    return 2 * area * nheads * products


def parse_count(text: str) -> int:
    """Read a whole number, "65536" or "64K"; K, M and G are powers of 1024.

    Raises
    ------
    ValueError
    """
    match = re.fullmatch(r"\s*([+-]?[0-9]{1,18})([KMG]?)\s*", text)
    if not match:
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")
