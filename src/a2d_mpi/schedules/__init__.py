"""Methods of distributed attention, each written down once, as data.

`attention2d` is the file to read first, after the words in `steps`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from a2d_mpi.core.balance import balanced, shares
from a2d_mpi.core.chunks import splits_own_shard
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.mask_check import check_visible
from a2d_mpi.core.masks import Causal, Full, Mask
from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.schedules import alone, attention2d, blocks, heads, node_aware, ring, triangle
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Sizes

METHODS: dict[str, Method] = {
    "attention2d": attention2d.METHOD,
    "ring": ring.RING,
    "striped ring": ring.STRIPED_RING,
    "double ring": ring.DOUBLE_RING,
    "triangle": triangle.METHOD,
    "node aware": node_aware.METHOD,
    "blocks": blocks.METHOD,
}

MOST_EXACT = 128


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
    rank: Ranks,
    overlap: bool = True,
    **others: Any,
) -> list[Schedule]:
    """The schedules of a logical rank, or of several, one after the other.

    That of its context group and, with a head axis, the exchange of heads before and after it.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    phase : {"forward", "backward"}
    layout : Layout
    problem : Problem
        With the counts of all ranks of the layout and all heads.
    rank : Ranks
    overlap : bool
    **others
        Further fields of the `Schedule` of the context group.

    Raises
    ------
    ValueError
        If there is no such method, or the problem does not fit the layout.
    """
    if problem.shards.nshards != layout.size:
        raise ValueError(f"{problem.shards.nshards} shards for {layout.size} ranks")
    known, back, u = _known(method), phase == "backward", layout.heads
    group = problem.context_group(u)
    whole = problem.config
    rows, cols, inner = known.shape(layout)
    alike = {"overlap": overlap, "narrow": whole.narrow, "shares_kv": whole.nheads_kv < u}
    nodes = None
    if known.knows_nodes:
        nodes = layout.nodes_of_group(None if np.ndim(rank) else rank % u)
    sizes = Sizes(rows, cols, group, **{"inner": inner, "nodes": nodes, **alike})
    inside = Schedule(rank // u, sizes, (u, rank % u), **others)
    of = known if layout.positions > 1 else alone
    (of.backward if back else of.forward)(inside)
    if u == 1:
        return [inside]
    sizes = Sizes(1, u, problem, **alike)
    before, after = (Schedule(rank, sizes) for _ in range(2))
    heads.share(before, back)
    heads.collect(after, back)
    return [before, inside, after]


def write_all(
    method: str, phase: str, layout: Layout, problem: Problem, overlap: bool = True
) -> list[list[Schedule]]:
    """The schedules of all logical ranks; see `write`.  The latest are remembered.

    Either one chain for all ranks at once, or, if their steps differ (`Method.at_once`, or uneven
    nodes), one for each rank.  In the former all ranks keep some work on their own shard for the
    end, or none does; and under a causal mask more than `MOST_EXACT` ranks are taken to send whole
    shards, as the busiest of them does: to tell who needs less takes minutes.
    """
    return _write_all(method, phase, essence(method, layout), problem, overlap)


def essence(method: str, layout: Layout) -> Layout:
    """The layout without what the method's schedules do not depend on."""
    nodes = layout.nodes if _known(method).knows_nodes else None
    return Layout(layout.rows, layout.cols, layout.heads, nodes=nodes)


@lru_cache(maxsize=2)  # both phases of layouts that differ in what is not their essence
def _write_all(
    method: str, phase: str, layout: Layout, problem: Problem, overlap: bool
) -> list[list[Schedule]]:
    least = min(problem.context_group(layout.heads).counts)
    if _known(method).at_once:
        if layout.size > MOST_EXACT and type(problem.mask) is Causal:
            problem = replace(problem, mask=Full())
        with suppress(UnlikeRanks):
            chain = write(
                *(method, phase, layout, problem, np.arange(layout.size), overlap),
                cuts=lambda schedule, own, others, ranks: splits_own_shard(least, ranks),
            )
            return [chain]
    ranks = range(layout.size)
    return [write(method, phase, layout, problem, rank, overlap) for rank in ranks]
