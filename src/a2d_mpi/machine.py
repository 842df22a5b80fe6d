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

    [kernel.float32.forward]      # see Kernel; likewise backward, and other dtypes
    flops = 95e9
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np

from a2d_mpi import cost

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

PHASES = ("forward", "backward")
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
        if not (self.bandwidth > 0 and self.nics >= 1 and 0 <= self.hidden <= 1):
            raise ValueError(f"a link needs bandwidth > 0, nics >= 1, 0 <= hidden <= 1: {self}")
        if not (self.latency >= 0 and self.overhead >= 0):
            raise ValueError(f"a link needs latency >= 0 and overhead >= 0: {self}")


@dataclass(frozen=True)
class Kernel:
    """Seconds of a tile kernel on one core (or GPU), linear in what it touches.

    Attributes
    ----------
    flops : float
        FLOP/s of large tiles.
    call, head : float
        Seconds a call, and a call and key head.
    pair : float
        Seconds a visible pair and query head whatever headdim is (exponentials).
    key, query : float
        Seconds a key and key head, a query and query head, times headdim: copies, and idle parts
        of blocks.  They make the rate fall for tiles of few queries or few keys.
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
        values = [getattr(self, f.name) for f in fields(self)]
        if not (self.flops > 0 and min(values) >= 0):
            raise ValueError(f"a kernel needs flops > 0 and no negative time: {self}")

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
    """What each attribute of a `Kernel`, in their order, is multiplied with."""
    h, hkv, d = heads
    ones = np.ones_like(np.asarray(area, float))
    work = cost.flops(1, h, d, backward) * np.asarray(area, float)
    return [work, ones, hkv * ones, h * ones * area, d * hkv * ones * nk, d * h * ones * nq,
            h * ones * cut]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A profile; see the head of this module for the units and the meaning of its values."""

    name: str
    inside: Link
    between: Link
    kernels: Mapping[str, Mapping[str, Kernel]]
    ranks_per_node: int = 1
    cores_per_node: float | None = None
    memory: int | None = None
    reserved: int = 0
    start: float = 0.0
    step: float = 0.0
    turn: float = 0.0
    copy: float = float("inf")
    merge: float = float("inf")

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or not (self.cores_per_node or 1) > 0:
            raise ValueError(
                "a machine needs ranks_per_node >= 1 and cores_per_node > 0, got "
                f"{self.ranks_per_node} and {self.cores_per_node}"
            )
        if not (self.copy > 0 and self.merge > 0):
            raise ValueError("a machine needs copy > 0 and merge > 0")
        for name in ("start", "step", "turn", "reserved"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"a machine needs {name} >= 0, got {getattr(self, name)}")

    @property
    def share(self) -> float:
        """Share of a core that a rank has when all of its node compute."""
        return min(1.0, (self.cores_per_node or self.ranks_per_node) / self.ranks_per_node)

    def with_ranks_per_node(self, ranks: int) -> Machine:
        """The same nodes with another number of ranks on each, which share the same cores."""
        cores = self.cores_per_node or self.ranks_per_node
        return replace(self, ranks_per_node=ranks, cores_per_node=cores)

    def kernel(self, dtype: str, phase: str) -> Kernel:
        """The kernel of a dtype; ValueError if the profile has none."""
        if dtype not in self.kernels:
            raise ValueError(f"{self.name} has kernels for {sorted(self.kernels)}, not {dtype}")
        return self.kernels[dtype][phase]


def read_machine(path: str | Path) -> Machine:
    """Read a profile.

    Raises
    ------
    ValueError
        If it is no TOML, or a key is missing, unknown or of the wrong type, with its name.
    OSError
        If it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    try:
        links, kernels = data.pop("link", {}), data.pop("kernel", {})
        if missing := {"inside", "between"} - links.keys():
            raise ValueError(f"it lacks link.{min(missing)}")
        if unknown := links.keys() - {"inside", "between"}:
            raise ValueError(f"unknown link.{min(unknown)}")
        found = {}
        for dtype, by_phase in kernels.items():
            if set(by_phase) != set(PHASES):
                raise ValueError(f"kernel.{dtype} must have forward and backward")
            found[dtype] = {
                phase: _make(Kernel, x, f"kernel.{dtype}.{phase}") for phase, x in by_phase.items()
            }
        for name in ("memory", "reserved"):
            if name in data:
                data[name] = parse_size(data[name])
        given = {name: _make(Link, links[name], f"link.{name}") for name in ("inside", "between")}
        return _make(Machine, data, "", given | {"kernels": found})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse_size(text: str | int, unit: str = "B") -> int:
    """Bytes from "80GB" (80e9), "80GiB" (80 * 2**30), "4e9" or a number.

    Raises
    ------
    ValueError
        If it is none of these, negative or infinite.
    """
    found = re.fullmatch(rf"\s*([\d.]+(?:[eE]\+?\d+)?)\s*([KMGT]?i?){unit}?\s*", str(text))
    try:
        return round(float(found[1]) * _SUFFIXES[found[2]])
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is no size; write 80GB or 80GiB") from None


def parse_count(text: str) -> int:
    """Number of tokens from "1M" (1048576), "64K" (65536) or "1000": powers of 1024.

    Raises
    ------
    ValueError
    """
    found = re.fullmatch(r"(\d+)([KMG]?)", str(text))
    if not found:
        raise ValueError(f"{text!r} is no number of tokens; write 1048576, 1024K or 1M")
    return int(found[1]) * _SUFFIXES[found[2] + "i" * bool(found[2])]


def _make(kind: type, values: object, where: str, given: Mapping[str, object] = {}) -> object:
    """A dataclass from a TOML table; every key must be known and numbers must be numbers."""
    prefix = f"{where}." if where else ""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table")
    known = {f.name: f for f in fields(kind) if f.name not in given}
    if unknown := values.keys() - known.keys():
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
        if isinstance(value, bool) or not isinstance(value, wanted) or value != value:
            raise ValueError(f"{prefix}{name} must be {called}, got {value!r}")
    return kind(**values, **given)
