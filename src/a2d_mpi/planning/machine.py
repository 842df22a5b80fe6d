"""A machine: the numbers of its links, kernels and memory that a prediction needs.

Profiles (`a2d_mpi.planning.profile`) hold these numbers and describe them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import flops

# Types of the fields of a profile, and their names.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
}
# Smallest and largest valid value; outside a prediction might be 0 or not finite.  All other
# values are seconds.
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

Heads = tuple[int, int, int, int]  # nheads, nheads_kv, headdim, headdim_v


@dataclass(frozen=True)
class Link:
    """One class of connections.

    Attributes
    ----------
    bandwidth : float
        Bytes/s each way: of one rank inside a node, of one NIC between nodes.
    latency : float
        Seconds until the shortest message arrives.
    overhead : float
        Seconds that a rank spends on each message that it sends or receives.
    nics : int
        NICs of a node, shared by its ranks.  With fewer ranks than NICs a rank drives several.
    hidden : float
        The overlap rule: a transfer of t seconds takes ``(1 - hidden) t`` seconds of its
        receiver's core.  1: it takes none; 0: computing and transfers do not overlap.
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
        Seconds per call, and per KV head of a call.
    pair : float
        Seconds per visible pair and query head, independent of headdim (exponentials).
    key, query : float
        Seconds per element of a key (for each KV head) and of a query (for each query head), for
        copies and for unused parts of cache blocks.  The mean of headdim and headdim_v counts as
        the elements of a head.  These two make blocks of few queries or few keys slower.
    cut : float
        Seconds per query and query head, if a mask cuts a run of the query's keys.
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

    def seconds(self, calls: np.ndarray, heads: Heads, backward: bool) -> np.ndarray:
        """Return the seconds of kernel calls.

        Parameters
        ----------
        calls : (4, n) array
            Visible pairs, queries, keys, and queries of which the mask cuts a run of keys, of each
            call.
        heads : Heads
        backward : bool

        Returns
        -------
        (n,) float64
            A call without a visible pair costs `call` only, a call without tokens costs nothing.
        """
        terms = kernel_terms(calls, heads, backward)
        weights = [1 / self.flops, *(getattr(self, f.name) for f in fields(self)[1:])]
        full = sum(w * x for w, x in zip(weights, terms))
        return np.where(calls[0] > 0, full, np.where(terms[4] * terms[5], self.call, 0.0))


def kernel_terms(calls: ArrayLike, heads: Heads, backward: bool) -> list[np.ndarray]:
    """Return the factors of a `KernelModel`'s attributes, in their order, in a call's seconds."""
    (area, nq, nk, cut), (h, hkv, d, e) = np.asarray(calls, float), heads
    width, ones = (d + e) / 2, np.ones_like(area)
    work = flops(1, h, d, backward, e) * area
    return [work, ones, hkv * ones, h * area, width * hkv * nk, width * h * nq, h * cut]


@dataclass(frozen=True)
class Machine:
    """A machine; `a2d_mpi.planning.profile` has the units and the meaning of its values.

    `inside` or `between` is None if it was not measured.
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
    hop_overhead: float = 0.0
    copy: float = math.inf
    merge: float = math.inf
    computed_by: str = ""

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node))  # a dict of kernels has no hash

    @property
    def room(self) -> float:
        """Bytes that a rank has for its plans; inf without a limit."""
        return (self.memory or math.inf) - self.reserved

    @property
    def share(self) -> float:
        """Share of a core that a rank has when all ranks of its node compute."""
        cores = self.ranks_per_node if self.cores_per_node is None else self.cores_per_node
        return min(1.0, cores / self.ranks_per_node)

    def copying(self, size: float) -> float:
        """Return the seconds that a copy or a sum of this many bytes takes."""
        return size / self.copy / self.share

    def links_alone(self) -> Machine:
        """Return the same links between ranks that compute, copy and merge in almost no time."""
        kernel = KernelModel(flops=_BOUNDS["flops"][1])
        kernels = {dtype: dict.fromkeys(x, kernel) for dtype, x in self.kernels.items()}
        times = {x.name: x.default for x in fields(self) if isinstance(x.default, float)}
        name = f"{self.name}, links alone"
        return replace(self, **times, name=name, kernels=kernels, computed_by="")

    def node_of(self, layout: Layout) -> np.ndarray:
        """Return the node of every rank of a layout, (P,) int64."""
        return layout.world_ranks() // self.ranks_per_node

    def links(self, ranks: int) -> tuple[Link, Link]:
        """Return the links inside nodes and between nodes for a number of ranks.

        The ranks fill the nodes one after the other.  A link that these ranks do not use may be
        anything.

        Raises
        ------
        ValueError
            If the profile lacks a link that these ranks use.
        """
        needed = {"inside": min(ranks, self.ranks_per_node) > 1,
                  "between": ranks > self.ranks_per_node}  # fmt: skip
        for name, used in needed.items():
            if used and getattr(self, name) is None:
                raise ValueError(
                    f"{self.name} has no link.{name}, which {ranks} ranks need, "
                    f"{self.ranks_per_node} per node: calibrate on more ranks or more nodes"
                )
        return self.inside or Link(1.0), self.between or Link(1.0)

    def host_kernel(self, dtype: str) -> str | None:
        """Return the kernel of the host that was measured, such as "numba"; None on a GPU."""
        match = re.search(rf"\b{dtype}: (numpy|numba|onednn)\b", self.computed_by)
        return match and match[1]

    def kernel(self, dtype: str, phase: str) -> KernelModel:
        """Return the kernel of a dtype and phase; ValueError if the profile has none."""
        if dtype not in self.kernels:
            raise ValueError(
                f"{self.name} has kernels for {sorted(self.kernels)}, but not for {dtype}: take "
                "another dtype, or measure this one (calibrate.py --dtypes)"
            )
        return self.kernels[dtype][phase]


def _check(values: Link | KernelModel | Machine) -> None:
    """Raise ValueError with the name of the first value that has a wrong type or is too large."""
    for field in fields(values):
        value = getattr(values, field.name)
        kind, called = _KINDS.get(str(field.type).removesuffix(" | None"), (object, ""))
        if value == field.default:
            continue
        if not isinstance(value, kind):
            raise ValueError(f"{field.name} must be {called}, got {value!r}")
        least, most = _BOUNDS.get(field.name, _SECONDS)
        if isinstance(value, (int, float)) and not least <= value <= most:
            raise ValueError(f"{field.name} must be from {least:g} to {most:g}, got {value!r}")
