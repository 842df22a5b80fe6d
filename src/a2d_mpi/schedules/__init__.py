"""Methods of distributed attention, each written down once, as data.

`attention2d` is the file to read first, after the words in `steps`.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.check import check_visible
from a2d_mpi.masks.mask import Full, Mask
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Enough, Program
from a2d_mpi.sharding.distribution import Distribution, shares


class Methods(UserDict):
    """Methods by name.  The module of a method is imported when the method is first used."""

    def __getitem__(self, name: str) -> Method:
        """Get a method."""
        method = self.data[name]
        if isinstance(method, str):
            method = self.data[name] = _imported(method)
        return method


def _imported(where: str) -> object:
    module, name = where.split(":")
    return getattr(import_module(f"a2d_mpi.schedules.{module}"), name)


METHODS: Methods = Methods(
    {
        "attention2d": "attention2d:METHOD",
        "ring": "ring:RING",
        "striped ring": "ring:STRIPED_RING",
        "double ring": "ring:DOUBLE_RING",
        "triangle": "triangle:METHOD",
        "node aware": "node_aware:METHOD",
        "blocks": "blocks:METHOD",
    }
)


def register_method(name: str, method: Method) -> None:
    """Add a method of one's own to `METHODS`, by which plans, planner and drivers find it.

    Parameters
    ----------
    name : str
        Words of lower-case letters and digits, with a blank between two words.
    method : Method

    Raises
    ------
    ValueError
        If the name is taken or no such name, or this is no `Method`.
    """
    if name in (*METHODS, "all", "auto"):
        raise ValueError(f"there is a method {name!r} already")
    if not re.fullmatch("[a-z0-9]+( [a-z0-9]+)*", name):
        raise ValueError(f"a method's name must be words of a-z and 0-9, got {name!r}")
    if not isinstance(method, Method):
        raise ValueError(f"method {name!r} must be a Method, got {method!r}")
    METHODS[name] = method


def roundings(method: str, layout: Layout, kind: str) -> int:
    """How often a partial result, and with a head axis the result, is encoded at most.

    One time after the other, where plans send in a format of the wire; `kind` as of `Method`.
    """
    inside = _known(method).roundings(layout, kind) if layout.positions > 1 else 0
    return inside + (layout.heads > 1)


def leaves_open(method: str, layout: Layout, config: AttentionConfig, mask: Mask) -> bool:
    """Whether neither the method nor the layout nor the mask settles the distribution."""
    settled = _known(method).distribution or layout.distribution
    return (
        not settled
        and mask.default_distribution == "balanced"
        and config.seqlen == config.seqlen_kv
    )


def default_distribution(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    mask: Mask,
    speed: float | None = None,
) -> tuple[str, str]:
    """The distribution that a method takes if none is asked for, and why.

    `speed`: of the machine, as of `a2d_mpi.sharding.choice.choose`.
    """
    known = _known(method)
    if leaves_open(method, layout, config, mask):
        from a2d_mpi.sharding.choice import choose

        sizes = *known.tiles(layout), config.dtype_of("q").itemsize
        return choose(mask, config.seqlen, *sizes, speed)
    if known.distribution:
        return known.distribution, f"the distribution of {method}"
    if layout.distribution:
        return layout.distribution, "the planner's choice"
    return mask.default_distribution, f"the default of {type(mask).__name__}"


def problem_of(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    mask: Mask,
    distribution: str | None = None,
    distribution_kv: str | None = None,
) -> Problem:
    """The problem of a method on a layout, with the owner of each token.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    config : AttentionConfig
    mask : Mask
    distribution : str, optional
        Of the queries and, in self-attention, the keys; default: the one that the method takes.
    distribution_kv : str, optional
        Of the keys, in cross-attention; default: that of the queries.

    Raises
    ------
    ValueError
        If there is no such method or distribution, it does not fit, or the mask's `visible` does
        not return what it must.
    """
    n, m = config.seqlen, config.seqlen_kv
    known, keys, aligned = _known(method), None, mask.aligned(n, m)
    check_visible(aligned, n, m)
    name, why = distribution, "asked for"
    if name is None:
        name, why = default_distribution(method, layout, config, mask)
    if known.place:
        own = config.cp_group(layout.heads)
        runs = known.place(mask, n, layout.positions, own.nheads_kv / own.nheads)
        listed = tuple(x for whole in runs for x in shares(whole, layout.heads))
        shards = Distribution(name, n, layout.size, layout.heads, listed, why)
        return Problem(AttentionConfig(**config.arguments), shards, mask)
    sizes = *known.tiles(layout), layout.heads
    shards = distribute(name, mask if n == m else Full(), n, *sizes, why)
    if n != m or distribution_kv not in (None, name):
        keys = distribute(distribution_kv or name, Full(), m, *sizes)
    return Problem(AttentionConfig(**config.arguments), shards, aligned, keys)


def distribute(
    name: str, mask: Mask, seqlen: int, rows: int, cols: int, heads: int = 1, why: str = ""
) -> Distribution:
    """Distribution of one sequence on ranks that compute so many rows and columns of tiles."""
    if name == "balanced":
        return _balanced(mask, seqlen, rows, cols, heads, why)
    return _by_formula(name, seqlen, rows * cols * heads, heads, None, why)


@lru_cache(maxsize=64)
def _balanced(mask: Mask, seqlen: int, rows: int, cols: int, heads: int, why: str) -> Distribution:
    from a2d_mpi.sharding.balance import balanced

    listed = balanced(mask, seqlen, rows, cols, heads)
    return Distribution("balanced", seqlen, rows * cols * heads, heads, listed, why)


_by_formula = lru_cache(maxsize=64)(Distribution)  # it remembers the runs of its shards


def _known(method: str) -> Method:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; one of {tuple(METHODS)}")
    return METHODS[method]


class Part(NamedTuple):
    """One of the programs that a rank runs one after the other; a value, not written yet.

    Attributes
    ----------
    writer : callable
        Writes the steps.
    group : Group
    rank : int
        In the group.
    stride, offset : int
        The rank p of the group is the rank ``p stride + offset`` of the layout.
    """

    writer: Callable[[Program], None]
    group: Group
    rank: int
    stride: int = 1
    offset: int = 0

    @property
    def anywhere(self) -> Part:
        """The same program for the first ranks: equal for all ranks that run it."""
        return Part(self.writer, self.group, self.rank)

    def write(self, steps: int | None = None) -> Program:
        """Write the program, or its first steps and waits for the messages of these."""
        program = Program(self.rank, self.group, self.stride, self.offset, steps)
        with suppress(Enough):
            self.writer(program)
        program.finish()
        return program


def write(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool = True,
) -> list[Program]:
    """Write the programs of one rank, which it runs one after the other; see `parts_of`."""
    return [x.write() for x in parts_of(method, phase, layout, problem, rank, overlap)]


def parts_of(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool = True,
) -> list[Part]:
    """The program of a rank's context-parallel group and, with a head axis, the exchange of heads.

    Ranks have the same program where writer, group and rank in the group are equal: the U ranks of
    a position in their context-parallel groups, and ranks of Ulysses groups that are alike.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    phase : {"forward", "backward"}
    layout : Layout
    problem : Problem
        With all ranks of the layout and all heads.
    rank : int
        In the layout.
    overlap : bool

    Raises
    ------
    ValueError
        If there is no such method, or the problem does not fit the layout.
    """
    groups, u = _groups(method, layout, problem, overlap), layout.heads
    position, head = divmod(rank, u)
    known = _known(method)
    if layout.positions == 1:
        from a2d_mpi.schedules import alone as known
    attention = Part(getattr(known, phase), groups.inside[head], position, u, head)
    if u == 1:
        return [attention]
    from a2d_mpi.schedules import heads

    before, after = heads.EXCHANGES[phase]
    ulysses = groups.ulysses(position), head, 1, position * u
    return [Part(before, *ulysses), attention, Part(after, *ulysses)]


class _Groups:
    """Groups of all ranks of a layout: the context-parallel groups, and the Ulysses groups."""

    def __init__(self, method: str, layout: Layout, problem: Problem, overlap: bool) -> None:
        if problem.shards.nshards != layout.size:
            raise ValueError(f"{problem.shards.nshards} shards for {layout.size} ranks")
        known, u, config = _known(method), layout.heads, problem.config
        rows, cols, inner = known.shape(layout)
        group = problem.cp_group(u)
        self._alike = {"overlap": overlap, "mixed_precision": config.mixed_precision}
        self._alike["stream"] = known.streams and layout.stream
        self._alike["shares_kv"] = config.nheads_kv < u
        nodes = [layout.nodes_of_group(x) if known.knows_nodes else None for x in range(u)]
        self.inside = [
            Group(rows, cols, group, group.config, inner=inner, nodes=_renamed(x), **self._alike)
            for x in nodes
        ]
        self._heads, self._problem = u, problem
        self._known: dict[int, Group] = {}

    def ulysses(self, position: int) -> Group:
        """The Ulysses group of a position, whose tokens are numbered among themselves."""
        if position not in self._known:
            u, config = self._heads, self.inside[0].config
            members = range(position * u, (position + 1) * u)
            self._known[position] = Group(1, u, self._problem.of(members), config, **self._alike)
        return self._known[position]


_groups = lru_cache(maxsize=4)(_Groups)  # the programs of all ranks share what their groups know


def _renamed(nodes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The same nodes with names from 0 in the same order: groups that are alike are equal."""
    if nodes is None:
        return None
    names = {x: i for i, x in enumerate(sorted(set(nodes)))}
    return tuple(names[x] for x in nodes)


def essence(method: str, layout: Layout) -> Layout:
    """The layout without what the method's programs do not depend on."""
    known = _known(method)
    nodes, stream = layout.nodes if known.knows_nodes else None, known.streams and layout.stream
    return Layout(layout.rows, layout.cols, layout.heads, nodes=nodes, stream=stream)
