"""The trees along which the rows of a line travel: stars, and trees of two levels on nodes.

The owner of some rows is the root of a tree.  Every other rank has a parent, from which it gets
the rows, and to which it sends its partial result for them.  On a plain grid all trees are stars;
only nodes of several ranks and triangles have others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.layout import Layout


class Trees(NamedTuple):
    """Parents and children of one rank in the trees of all owners of a line.

    Attributes
    ----------
    parents : dict of int to int
        By owner, the rank from which this rank gets the owner's rows.  Without an owner of which
        it needs nothing.
    branches : dict of int to dict of int to tuple of int
        By owner, the children of this rank.  Each child comes with the ranks of its branch: the
        child and all ranks below it.  Without owners for which this rank has no children.
    """

    parents: dict[int, int]
    branches: dict[int, dict[int, tuple[int, ...]]]


def star(rank: int, ranks: Iterable[int]) -> Trees:
    """Make stars: every rank gets an owner's rows from the owner, and returns its results there.

    So nobody passes rows on, and nobody but the owner adds results of others.
    """
    others = [x for x in ranks if x != rank]
    return Trees({x: x for x in others}, {rank: {x: (x,) for x in others}})


def by_node(rank: int, ranks: Sequence[int], nodes: Sequence[int]) -> Trees:
    """Make trees in which one rank of each node fetches an owner's rows and passes them on.

    The fetchers of owner k of a node are rank k, modulo their number, of each other node.  So the
    ranks of a node share this work evenly.

    Parameters
    ----------
    rank : int
    ranks : sequence of int
        The ranks of the line.
    nodes : sequence of int
        Node of every rank of the group.
    """
    members = members_of(ranks, nodes)

    def fetcher(owner: int, node: int) -> int:
        return members[node][members[nodes[owner]].index(owner) % len(members[node])]

    near = {x: (x,) for x in members[nodes[rank]] if x != rank}
    parents, branches = {}, {rank: {**near}}
    for owner in (x for x in ranks if x != rank):
        first = owner if owner in near else fetcher(owner, nodes[rank])
        parents[owner] = owner if first == rank else first
        if first == rank and near:
            branches[owner] = near
    for node in (x for x in members if x != nodes[rank]):
        first = fetcher(rank, node)
        branches[rank][first] = (first, *(x for x in members[node] if x != first))
    return Trees(parents, branches)


def seen_from(rank: int, parents: Mapping[int, Mapping[int, int]]) -> Trees:
    """Return the trees as a rank sees them, given the parents of all ranks by owner.

    Rows pass through at most one rank on their way.
    """
    branches = {
        owner: {x: (x, *(y for y in tree if tree[y] == x)) for x in tree if tree[x] == rank}
        for owner, tree in parents.items()
    }
    return Trees(
        {owner: tree[rank] for owner, tree in parents.items() if rank in tree},
        {owner: children for owner, children in branches.items() if children},
    )


def members_of(ranks: Sequence[int], nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return the ranks of each node, in ascending order; nodes without ranks are left out."""
    members: dict[int, list[int]] = {}
    for x in sorted(ranks):
        members.setdefault(nodes[x], []).append(x)
    return members


def in_equal_nodes(layout: Layout) -> bool:
    """Return True if nodes divide all rows, and all columns, into equal groups of several ranks.

    Rows or columns, not both, may lie inside nodes or have one rank per node.  All
    context-parallel groups must be divided in the same way.
    """
    divisions = {layout.nodes_of_group(head) for head in range(layout.heads)}
    if layout.nodes is None or len(divisions) > 1:
        return False
    grid = np.reshape(divisions.pop(), (layout.rows, layout.cols))
    shares, lengths = (_equal_share(grid), _equal_share(grid.T)), (layout.cols, layout.rows)
    return min(shares) > 0 and any(1 < b < n for b, n in zip(shares, lengths))


def _equal_share(node: np.ndarray) -> int:
    """Return how many ranks of a line each of its nodes has; 0 if the numbers differ.

    `node` is (lines, ranks of a line) int.
    """
    lines = np.arange(len(node))[:, None] * (node.max() + 1)
    _, counts = np.unique(lines + node, return_counts=True)
    return int(counts[0]) if (counts == counts[0]).all() else 0


def from_here(rank: int, ranks: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Return ranks in turn: from `rank` on around its node, then likewise on the next nodes.

    So no rank is the first target of all.
    """
    members = members_of(ranks, nodes)
    names, me = sorted(members), nodes[rank]
    begin, index = names.index(me), members[me].index(rank)
    turned = ((members[x], index % len(members[x])) for x in names[begin:] + names[:begin])
    return [y for x, i in turned for y in x[i:] + x[:i]]
