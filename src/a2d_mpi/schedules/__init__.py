"""Methods of distributed attention, each written down once, as data.

`attention2d` is the file to read first, after the words in `steps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from a2d_mpi.core.balance import balanced, shares
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.mask_check import check_visible
from a2d_mpi.core.masks import Full, Mask
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import alone, attention2d, blocks, heads, node_aware, ring, triangle
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program

METHODS: dict[str, Method] = {
    "attention2d": attention2d.METHOD,
    "ring": ring.RING,
    "striped ring": ring.STRIPED_RING,
    "double ring": ring.DOUBLE_RING,
    "triangle": triangle.METHOD,
    "node aware": node_aware.METHOD,
    "blocks": blocks.METHOD,
}


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


def distribution_of(method: str, mask: Mask) -> str:
    """The distribution that a method takes for a mask."""
    return _known(method).distribution or mask.default_distribution


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
    name, n, m = distribution or distribution_of(method, mask), config.seqlen, config.seqlen_kv
    known, keys, aligned = _known(method), None, mask.aligned(n, m)
    check_visible(aligned, n, m)
    if known.place:
        own = config.context_group(layout.heads)
        runs = known.place(mask, n, layout.positions, own.nheads_kv / own.nheads)
        listed = tuple(x for whole in runs for x in shares(whole, layout.heads))
        shards = Distribution(name, n, layout.size, layout.heads, listed)
        return Problem(AttentionConfig(**config.arguments), shards, mask)
    sizes = *known.tiles(layout), layout.heads
    shards = distribute(name, mask if n == m else Full(), n, *sizes)
    if n != m or distribution_kv not in (None, name):
        keys = distribute(distribution_kv or name, Full(), m, *sizes)
    return Problem(AttentionConfig(**config.arguments), shards, aligned, keys)


@lru_cache(maxsize=64)
def distribute(
    name: str, mask: Mask, seqlen: int, rows: int, cols: int, heads: int = 1
) -> Distribution:
    """Distribution of one sequence on ranks that compute so many rows and columns of tiles.

    Remembered: a balanced one takes a second or two.
    """
    listed = balanced(mask, seqlen, rows, cols, heads) if name == "balanced" else None
    return Distribution(name, seqlen, rows * cols * heads, heads, listed)


def _known(method: str) -> Method:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; one of {tuple(METHODS)}")
    return METHODS[method]


def write(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool = True,
) -> list[Program]:
    """Write the programs of one rank, which it runs one after the other.

    The program of its context-parallel group and, with a head axis, the exchange of heads before
    and after it.

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
    return next(write_each(method, phase, layout, problem, (rank,), overlap))


def write_each(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    ranks: Iterable[int],
    overlap: bool = True,
) -> Iterator[list[Program]]:
    """Write the programs of several ranks, one rank after the other; arguments as of `write`.

    The ranks of a Ulysses group have the same program of their context-parallel group: where they
    follow each other it is written once.
    """
    groups = _groups(method, layout, problem, overlap)
    backward, u = phase == "backward", layout.heads
    known, inside = _known(method) if layout.positions > 1 else alone, None
    for rank in ranks:
        position, group = rank // u, groups.inside[rank % u]
        if inside is None or (inside.rank, inside.group) != (position, group):
            inside = Program(position, group)
            (known.backward if backward else known.forward)(inside)
            inside.finish()
        programs = [inside.of_ranks(u, rank % u)]
        if u > 1:
            before, after = (Program(rank, groups.heads) for _ in range(2))
            heads.share(before, backward)
            heads.collect(after, backward)
            before.finish()
            after.finish()
            programs = [before, *programs, after]
        yield programs


class _Groups(NamedTuple):
    """Groups of all ranks of a layout: the context-parallel groups, and the Ulysses groups."""

    inside: list[Group]
    heads: Group


@lru_cache(maxsize=4)  # the programs of all ranks share what their groups know
def _groups(method: str, layout: Layout, problem: Problem, overlap: bool) -> _Groups:
    if problem.shards.nshards != layout.size:
        raise ValueError(f"{problem.shards.nshards} shards for {layout.size} ranks")
    known, u, config = _known(method), layout.heads, problem.config
    rows, cols, inner = known.shape(layout)
    group = problem.context_group(u)
    alike = {"overlap": overlap, "narrow": config.narrow, "shares_kv": config.nheads_kv < u}
    inside = [
        Group(rows, cols, group, group.config, inner=inner, nodes=nodes, **alike)
        for nodes in (map(layout.nodes_of_group, range(u)) if known.knows_nodes else [None] * u)
    ]
    return _Groups(inside, Group(1, u, problem, group.config, **alike))


def essence(method: str, layout: Layout) -> Layout:
    """The layout without what the method's programs do not depend on."""
    nodes = layout.nodes if _known(method).knows_nodes else None
    return Layout(layout.rows, layout.cols, layout.heads, nodes=nodes)
