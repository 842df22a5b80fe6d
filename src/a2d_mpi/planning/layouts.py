"""The layouts that suit a method on a machine, without layouts that must be equally fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import misfit
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS


def layouts(method: str, ranks: int, work: Workload, ranks_per_node: int) -> Iterator[Layout]:
    """Yield the layouts that suit a method, without layouts that must be equally fast.

    Parameters
    ----------
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    ranks : int
        Ranks of each layout.
    work : Workload
    ranks_per_node : int
        Consecutive world ranks on each node.
    """
    rules = METHODS[method]
    if rules.distribution and work.mask.default_distribution == "contiguous":
        return  # for these masks it is the same as the method without its own distribution
    if not rules.takes(work.mask):
        return
    node, seen = np.arange(ranks) // ranks_per_node, set()
    for heads in _divisors(ranks):
        if misfit(work.nheads, work.nheads_kv, heads):
            continue
        positions = ranks // heads
        for rows in _divisors(positions):
            cols = positions // rows
            for order, block in (
                _node_blocks(rows, cols, heads, ranks_per_node)
                if rules.knows_nodes
                else product(map("".join, permutations("rcu")), [(1, 1)])
            ):
                layout = Layout(rows, cols, heads, order, block)
                # Layouts whose ranks share nodes in the same way are equally fast.
                placed = layout.on_nodes(node)
                if rules.knows_nodes:
                    layout = placed
                key = (rows, cols, heads, placed.nodes)
                if key not in seen and rules.suits(layout):
                    seen.add(key)
                    yield layout


def known_as(method: str, layout: Layout) -> str:
    """Return the name of a method on this layout in the literature, or ""."""
    if method == "attention2d" and layout.size > 1:
        if layout.positions == 1:
            return "Ulysses"
        return "tree" if layout.rows == 1 else "all-gather" if layout.cols == 1 else ""
    return "USP" if method == "ring" and layout.heads > 1 else ""


def fewer_ranks(method: str, ranks: int, work: Workload, idle: float) -> list[int]:
    """Return the smaller numbers of ranks that suit a method, if `idle` allows them."""
    axes = (u for u in range(1, ranks + 1) if not misfit(work.nheads, work.nheads_kv, u))
    numbers = {u * METHODS[method].most_positions(ranks // u) for u in axes}
    return sorted(x for x in numbers if (1 - idle) * ranks <= x < ranks)


def _node_blocks(
    rows: int, cols: int, heads: int, ranks_per_node: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield rank orders in which each node has a block of the grid and some of the heads."""
    for shared in _divisors(math.gcd(heads, ranks_per_node)):
        for height in _divisors(math.gcd(rows, size := ranks_per_node // shared)):
            if cols % (size // height) == 0:
                yield "rcu", (height, size // height)


def _divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]
