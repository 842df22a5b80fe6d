"""A machine: its links, kernels and memory, as numbers that a prediction needs.

Profiles (`a2d_mpi.planning.profile`) hold these numbers, and describe them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from a2d_mpi.core.sizes import flops

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
        Seconds a key and KV head, a query and query head, times the mean of headdim and headdim_v:
        copies, and idle parts of cache blocks.  They make the rate fall for blocks of few queries
        or few keys.
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
        heads: tuple[int, int, int, int],
        backward: bool = False,
    ) -> np.ndarray:
        """Seconds of calls with `area` visible pairs, `nq` queries, `nk` keys, `cut` queries cut.

        `heads`: nheads, nheads_kv, headdim, headdim_v.  The arrays broadcast; a call without a
        visible pair costs `call` only, one without tokens nothing.
        """
        terms = kernel_terms(area, nq, nk, cut, heads, backward)
        weights = [1 / self.flops, *(getattr(self, f.name) for f in fields(self)[1:])]
        whole = sum(w * x for w, x in zip(weights, terms))
        return np.where(np.asarray(area) > 0, whole, np.where(terms[4] * terms[5], self.call, 0.0))


def kernel_terms(area, nq, nk, cut, heads: tuple[int, int, int, int], backward: bool) -> list:
    """Factors of the attributes of a `KernelModel`, in their order, in the seconds of a call."""
    h, hkv, d, e = heads
    width = (d + e) / 2
    ones = np.ones_like(np.asarray(area, float))
    work = flops(1, h, d, backward, e) * np.asarray(area, float)
    rows = width * hkv * ones * nk, width * h * ones * nq
    return [work, ones, hkv * ones, h * ones * area, *rows, h * ones * cut]


@dataclass(frozen=True)
class Machine:
    """A machine; see `a2d_mpi.planning.profile` for the units and the meaning of its values.

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
    hop_overhead: float = 0.0
    copy: float = math.inf
    merge: float = math.inf
    computed_by: str = ""

    def __post_init__(self) -> None:
        for field, most in (("name", LONGEST_NAME), ("computed_by", 3 * LONGEST_NAME)):
            text = getattr(self, field)
            whole = text == text.encode(errors="replace").decode()  # not bytes of other codes
            if not whole or len(text) > most:
                raise ValueError(
                    f"{field} must be UTF-8, at most {most} characters, got {shown(text)}"
                )
        _check(self)

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node))  # kernels are in a dict

    @property
    def share(self) -> float:
        """Share of a core that a rank has when all of its node compute."""
        return min(1.0, self._cores / self.ranks_per_node)

    @property
    def _cores(self) -> float:
        return self.ranks_per_node if self.cores_per_node is None else self.cores_per_node

    def copying(self, size: float) -> float:
        """Seconds to copy, or to add, this many bytes."""
        return size / self.copy / self.share

    def with_ranks_per_node(self, ranks: int) -> Machine:
        """The same nodes with another number of ranks on each, which share the same cores."""
        return replace(self, ranks_per_node=ranks, cores_per_node=self._cores)

    def links_alone(self) -> Machine:
        """The same links, between ranks that compute, copy and merge in next to no time."""
        kernel = KernelModel(flops=_BOUNDS["flops"][1])
        kernels = {dtype: dict.fromkeys(x, kernel) for dtype, x in self.kernels.items()}
        times = {x.name: x.default for x in fields(self) if isinstance(x.default, float)}
        name = f"{self.name}, links alone"
        return replace(self, **times, name=name, kernels=kernels, computed_by="")

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

    def host_kernel(self, dtype: str) -> str | None:
        """The kernel of the host that was measured, "numpy" or "numba"; None: a GPU's."""
        found = re.search(rf"\b{dtype}: (numpy|numba)\b", self.computed_by)
        return found and found[1]

    def kernel(self, dtype: str, phase: str) -> KernelModel:
        """The kernel of a dtype; ValueError if the profile has none."""
        if dtype not in self.kernels:
            known = sorted(map(one_line, self.kernels))
            raise ValueError(f"{one_line(self.name)} has kernels for {known}, not {dtype}")
        return self.kernels[dtype][phase]


def _check(values: Link | KernelModel | Machine) -> None:
    """Raise ValueError, with the name, for a number that is out of bounds."""
    for field in fields(values):
        value = getattr(values, field.name)
        least, most = _BOUNDS.get(field.name, _SECONDS)
        if not isinstance(value, (int, float)) or value == field.default:
            continue
        if not least <= value <= most:
            raise ValueError(
                f"{field.name} must be from {least:g} to {most:g}, got {shown(value)}"
            )


def shown(value: object) -> str:
    """Text of a value that is short enough for a message."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length() * math.log10(2):.0f} digits"
    if isinstance(value, (int, float, str)):
        return repr(value) if len(str(value)) < 80 else f"{str(value)[:60]!r}..."
    return f"a {type(value).__name__}"


def one_line(text: str) -> str:
    """The text with escapes for all that is not printed as a character: line ends, too."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
