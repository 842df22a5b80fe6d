"""Trees along which slices of a triangle's segments travel, so that traffic is even.

In a star, every owner sends its rows to all members of a team that need them, and receives a
partial result from each.  Owners of early segments would send most, because most queries see their
keys.  Owners of late segments would receive most.  In a tree, some members get rows from another
member.  This member also merges their partial results with its own.  A row passes through at most
one member.  The sum of the traffic stays the same, and the busiest rank has about the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from a2d_mpi.sharding.triangle_shards import column_members, row_members

Parents = dict[int, int]  # parent of each member: the owner or another member


@lru_cache(maxsize=16)
def trees(t: int, of_queries: int, of_keys: int) -> dict[tuple[int, bool, int], Parents]:
    """Return the trees of all slices of a triangle.

    Parameters
    ----------
    t : int
        T, the number of segments.
    of_queries, of_keys : int
        Sizes of a slice of queries and of a slice of keys; 0 if they do not travel.

    Returns
    -------
    dict of (int, bool, int) to Parents
        By segment, side (True: keys) and owner.

    Notes
    -----
    The search is greedy.  The busiest rank moves one of its children below another child, the one
    with the least load, as long as that helps.  A row that is passed on arrives later by the time
    of one slice.  If trees save less than that, all trees are stars.  Measured on six emulated
    nodes, where trees save half a slice of keys: stars take 764 ms, trees 884 ms (forward, gather
    only).
    """
    all_parents: dict[tuple[int, bool, int], Parents] = {}
    load: dict[int, int] = {}
    owned: dict[int, list[tuple[int, Parents]]] = {}
    for segment in range(t):
        rows, columns = row_members(segment), column_members(segment, t)
        for side, members, size in ((False, rows, of_queries), (True, columns, of_keys)):
            for owner in rows + columns:
                parents = {x: owner for x in members if x != owner}
                all_parents[segment, side, owner] = parents
                load[owner] = load.get(owner, 0) + size * len(parents)
                owned.setdefault(owner, []).append((size, parents))
    stars = {key: dict(parents) for key, parents in all_parents.items()}
    most = max(load.values())
    queue = [(-size, rank) for rank, size in load.items()]
    heapify(queue)
    while queue:
        negative, rank = heappop(queue)
        if -negative != load[rank] or not (move := _best(rank, owned[rank], load)):
            continue
        size, parents, child, to = move
        parents[child] = to
        for x, change in ((rank, -size), (to, size)):
            load[x] += change
            heappush(queue, (-load[x], x))
    saved = most - max(load.values())
    return all_parents if saved >= max(of_queries, of_keys) else stars


def _best(
    rank: int, owned: Sequence[tuple[int, Parents]], load: dict[int, int]
) -> tuple[int, Parents, int, int] | None:
    """Find the best move of a rank's child below another child; None if no move helps.

    Children with children of their own do not move, so that no row passes two members.

    Returns
    -------
    size : int
        Size of the slice.
    parents : Parents
        The tree.
    child, to : int
        The member that moves, and its new parent.
    """
    moves = []
    for size, parents in owned:
        children = [x for x, parent in parents.items() if parent == rank]
        busy = set(parents.values())
        for to in children:
            leaves = [x for x in children if x != to and x not in busy]
            if size and leaves and load[to] + size < load[rank]:
                child = max(leaves, key=lambda x: (load[x], -x))
                moves.append((load[to] + size, -size, to, child, parents))
    if not moves:
        return None
    _, size, to, child, parents = min(moves, key=lambda x: x[:4])
    return -size, parents, child, to
