"""What a machine can do: links, kernels, memory, read from a TOML profile.

A profile holds measured (``drivers/calibrate.py``) or quoted figures, in SI units::

    name = "two nodes"
    ranks_per_node = 4
    cores_per_node = 4            # cores (or GPUs) that the ranks of a node share
    memory = "80GB"               # of one rank
    reserved = "4GB"              # of that, what is not ours: runtime, kernels, MPI
    start = 2e-5                  # s: all ranks setting out, once a phase
    step = 1e-4                   # s of a core beside each kernel call: Python, cold caches
    turn = 1e-4                   # likewise beside each hop of a ring: every one is waited for
    copy = 1e10                   # bytes/s of copies, sums and zeros, by one core
    merge = 2e9                   # bytes/s of partial outs merged, by one core

    [link.inside]                 # between ranks of a node
    latency = 2e-6                # s until a message arrives, however short
    overhead = 1e-6               # s that its sender, and its receiver, spend on it
    bandwidth = 5e9               # bytes/s of one rank, each way
    hidden = 0.9                  # share of a transfer that a computing rank need not attend to

    [link.between]                # between nodes: here bandwidth is that of one NIC
    nics = 1                      # NICs of a node, shared by its ranks

    [kernel.float32.forward]      # see KernelModel; likewise backward, and other dtypes
    flops = 95e9

A link that was not measured is left out: such a profile does for ranks that do not need it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import flops

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

# Bytes of a profile and of a line: the parser's time grows with the square of what a line holds.
LONGEST, LONGEST_LINE = 1 << 16, 1000
LONGEST_NAME = 100
# The least and the most that a value may be: beyond these a prediction need not be finite, or is
# 0.  Values that are not here are seconds.
_BOUNDS: dict[str, tuple[float, float]] = {
    "bandwidth": (1, 1e18),
    "flops": (1, 1e24),
    "copy": (1, 1e18),
    "merge": (1, 1e18),
    "hidden": (0, 1),
    "nics": (1, 1 << 16),
    "ranks_per_node": (1, 1 << 16),
    "cores_per_node": (1e-3, 1 << 16),
    "memory": (1, 1 << 62),
    "reserved": (0, 1 << 62),
}
_SECONDS = (0, 1e6)
_SUFFIXES = {"": 1} | {
    prefix + i: (1024 if i else 1000) ** power
    for power, prefix in enumerate("KMGT", 1)
    for i in ("", "i")
}


@dataclass(frozen=True)
class Link:
    """One class of connections.

    Attributes
    ----------
    bandwidth : float
        Bytes/s each way: of one rank inside a node, of one NIC between nodes.
    latency : float
        Seconds until a message arrives, however short.
    overhead : float
        Seconds that a rank spends on each message that it sends or receives.
    nics : int
        Of a node, shared by its ranks; a rank that computes next to few others may drive several.
    hidden : float
        The overlap rule: a transfer of t seconds takes ``(1 - hidden) t`` of its receiver's core,
        from its computing if there is any.  1: none, 0: nothing overlaps.
    """

    bandwidth: float
    latency: float = 0.0
    overhead: float = 0.0
    nics: int = 1
    hidden: float = 1.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class KernelModel:
    """Linear model of a kernel on one core (or GPU): the seconds of a call.

    Attributes
    ----------
    flops : float
        FLOP/s of large blocks.
    call, head : float
        Seconds a call, and a call and KV head.
    pair : float
        Seconds a visible pair and query head, independent of headdim (exponentials).
    key, query : float
        Seconds a key and KV head, a query and query head, times headdim: copies, and idle parts
        of cache blocks.  They make the rate fall for blocks of few queries or few keys.
    cut : float
        Seconds a query and query head of which a mask cuts a run of keys.
    """

    flops: float
    call: float = 0.0
    head: float = 0.0
    pair: float = 0.0
    key: float = 0.0
    query: float = 0.0
    cut: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def seconds(
        self,
        area: np.ndarray,
        nq: np.ndarray,
        nk: np.ndarray,
        cut: np.ndarray,
        heads: tuple[int, int, int],
        backward: bool = False,
    ) -> np.ndarray:
        """Seconds of calls with `area` visible pairs, `nq` queries, `nk` keys, `cut` queries cut.

        `heads`: nheads, nheads_kv, headdim.  The arrays broadcast; a call without a visible pair
        costs `call` only, one without tokens nothing.
        """
        terms = kernel_terms(area, nq, nk, cut, heads, backward)
        weights = [1 / self.flops, *(getattr(self, f.name) for f in fields(self)[1:])]
        whole = sum(w * x for w, x in zip(weights, terms))
        return np.where(np.asarray(area) > 0, whole, np.where(terms[4] * terms[5], self.call, 0.0))


def kernel_terms(area, nq, nk, cut, heads: tuple[int, int, int], backward: bool) -> list:
    """Factors of the attributes of a `KernelModel`, in their order, in the seconds of a call."""
    h, hkv, d = heads
    ones = np.ones_like(np.asarray(area, float))
    work = flops(1, h, d, backward) * np.asarray(area, float)
    return [work, ones, hkv * ones, h * ones * area, d * hkv * ones * nk, d * h * ones * nq,
            h * ones * cut]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A profile; see the head of this module for the units and the meaning of its values.

    `inside` or `between` is None where it was not measured.
    """

    name: str
    inside: Link | None
    between: Link | None
    kernels: Mapping[str, Mapping[str, KernelModel]]
    ranks_per_node: int = 1
    cores_per_node: float | None = None
    memory: int | None = None
    reserved: int = 0
    start: float = 0.0
    step: float = 0.0
    turn: float = 0.0
    copy: float = math.inf
    merge: float = math.inf

    def __post_init__(self) -> None:
        whole = (
            self.name == self.name.encode(errors="replace").decode()
        )  # not bytes of other codes
        if not whole or len(self.name) > LONGEST_NAME:
            raise ValueError(
                f"name must be UTF-8, at most {LONGEST_NAME} characters, got {_shown(self.name)}"
            )
        _check(self)

    @property
    def share(self) -> float:
        """Share of a core that a rank has when all of its node compute."""
        return min(1.0, self._cores / self.ranks_per_node)

    @property
    def _cores(self) -> float:
        return self.ranks_per_node if self.cores_per_node is None else self.cores_per_node

    def with_ranks_per_node(self, ranks: int) -> Machine:
        """The same nodes with another number of ranks on each, which share the same cores."""
        return replace(self, ranks_per_node=ranks, cores_per_node=self._cores)

    def links(self, ranks: int) -> tuple[Link, Link]:
        """The links inside and between the nodes that so many ranks fill, one after the other.

        One that these ranks do not have may be anything.

        Raises
        ------
        ValueError
            If the profile lacks one that they have.
        """
        needed = {"inside": min(ranks, self.ranks_per_node) > 1,
                  "between": ranks > self.ranks_per_node}  # fmt: skip
        for name, used in needed.items():
            if used and getattr(self, name) is None:
                raise ValueError(
                    f"{one_line(self.name)} has no link.{name}, which {ranks} ranks need, "
                    f"{self.ranks_per_node} a node: calibrate with as many ranks on as many nodes"
                )
        return self.inside or Link(1.0), self.between or Link(1.0)

    def kernel(self, dtype: str, phase: str) -> KernelModel:
        """The kernel of a dtype; ValueError if the profile has none."""
        if dtype not in self.kernels:
            known = sorted(map(one_line, self.kernels))
            raise ValueError(f"{one_line(self.name)} has kernels for {known}, not {dtype}")
        return self.kernels[dtype][phase]


def read_machine(path: str | Path) -> Machine:
    """Read a profile.

    Raises
    ------
    ValueError
        If it is no TOML, or a key is missing, unknown, of the wrong type or out of bounds, with
        its name.
    OSError
        If it cannot be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    try:
        with open(path, "rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} bytes")
        if max(map(len, text.splitlines()), default=0) > LONGEST_LINE:
            raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
        data = tomllib.loads(text.decode().replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError too
        raise ValueError(one_line(f"{path} is no TOML profile: {error}")) from error
    try:
        links = _table(data.pop("link", {}), "link")
        if unknown := links.keys() - {"inside", "between"}:
            raise ValueError(f"unknown link.{min(unknown)}")
        found = {}
        for dtype, by_phase in _table(data.pop("kernel", {}), "kernel").items():
            if set(_table(by_phase, f"kernel.{dtype}")) != set(PHASES):
                raise ValueError(f"kernel.{dtype} must have forward and backward")
            found[dtype] = {
                phase: _make(KernelModel, x, f"kernel.{dtype}.{phase}")
                for phase, x in by_phase.items()
            }
        for name in ("memory", "reserved"):
            if isinstance(data.get(name), (str, float)):
                data[name] = parse_size(data[name], name)
        given = {
            name: _make(Link, links[name], f"link.{name}") if name in links else None
            for name in ("inside", "between")
        }
        return _make(Machine, data, "", given | {"kernels": found})
    except ValueError as error:
        raise ValueError(one_line(f"{path}: {error}")) from error


def one_line(text: str) -> str:
    """The text with escapes for all that is not printed as a character: line ends, too."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def parse_size(text: str | float, name: str = "") -> int:
    """Bytes from "80GB" (80e9), "80GiB" (80 * 2**30), "4e9" or a number.

    Raises
    ------
    ValueError
        If it is none of these, negative or infinite; it says what has that `name`.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:[eE]\+?\d+)?)\s*([KMGT]?i?)B?\s*", str(text))
    try:
        return round(float(found[1]) * _SUFFIXES[found[2]])
    except (TypeError, ValueError, KeyError, OverflowError):
        where = f"{name}: " if name else ""
        raise ValueError(f"{where}{_shown(text)} is no size; write 80GB or 80GiB") from None


def parse_count(text: str) -> int:
    """Number of tokens from "1M" (1048576), "64K" (65536) or "1000": powers of 1024.

    Raises
    ------
    ValueError
    """
    found = re.fullmatch(r"(\d{1,1000})([KMG]?)", str(text))
    if not found:
        raise ValueError(f"{_shown(text)} is no number of tokens; write 1048576, 1024K or 1M")
    return int(found[1]) * _SUFFIXES[found[2] + "i" * bool(found[2])]


def _table(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, got {_shown(value)}")
    return value


def _make(kind: type, values: object, where: str, given: Mapping[str, object] = {}) -> object:
    """A dataclass from a TOML table; every key must be known and numbers must be numbers."""
    prefix = f"{where}." if where else ""
    known = {f.name: f for f in fields(kind) if f.name not in given}
    if unknown := _table(values, where).keys() - known.keys():
        raise ValueError(f"unknown {prefix}{min(unknown)}; known are {sorted(known)}")
    for name, field in known.items():
        if name not in values:
            if field.default is MISSING:
                raise ValueError(f"it lacks {prefix}{name}")
            continue
        value, wanted, called = values[name], (int, float), "a number"
        if name == "name":
            wanted, called = str, "text"
        elif name in ("nics", "ranks_per_node", "memory", "reserved"):
            wanted, called = int, "a whole number"
        finite = not isinstance(value, float) or math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, wanted) or not finite:
            raise ValueError(f"{prefix}{name} must be {called}, got {_shown(value)}")
    try:
        return kind(**values, **given)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _check(values: Link | KernelModel | Machine) -> None:
    """Raise ValueError, with the name, for a number that is out of bounds."""
    for field in fields(values):
        value = getattr(values, field.name)
        least, most = _BOUNDS.get(field.name, _SECONDS)
        if not isinstance(value, (int, float)) or value == field.default:
            continue
        if not least <= value <= most:
            raise ValueError(
                f"{field.name} must be from {least:g} to {most:g}, got {_shown(value)}"
            )


def _shown(value: object) -> str:
    """Text of a value that is short enough for a message."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length() * math.log10(2):.0f} digits"
    if isinstance(value, (int, float, str)):
        return repr(value) if len(str(value)) < 80 else f"{str(value)[:60]!r}..."
    return f"a {type(value).__name__}"
