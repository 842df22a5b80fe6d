"""Trees along which the slices of a triangle's segments travel, so that no rank sends the most.

Every owner has rows for all members of a team that need them, and gets a partial result from each:
a star.  Owners of early segments would send most, for their keys are seen most; owners of late
ones would receive most.  So some members get rows from another member, not from the owner, and
give their partial results to another one, who merges them with its own.  No row passes two
members: the sum over ranks stays the same, and the largest rank comes down to about the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from a2d_mpi.sharding.triangle import column_members, row_members

Parents = dict[int, int]  # of each member: its parent, the owner or another member


@lru_cache(maxsize=16)
def trees(t: int, of_queries: int, of_keys: int) -> dict[tuple[int, bool, int], Parents]:
    """The trees of all slices of a triangle.

    Parameters
    ----------
    t : int
        T, the number of segments.
    of_queries, of_keys : int
        Sizes of a slice of queries and of one of keys; 0: they do not travel.

    Returns
    -------
    dict of (int, bool, int) to Parents
        By segment, side (True: keys) and owner.

    Notes
    -----
    Greedy: the rank with the most to do hangs one of its children on another, with the least to
    do, as long as that helps.  A row that is passed on comes later, by the time that one slice
    takes: if less than that is saved, all trees are stars.  Six emulated nodes, where half a slice
    of keys is saved: 764 ms with stars, 884 with trees (forward, gather only).
    """
    found: dict[tuple[int, bool, int], Parents] = {}
    load: dict[int, int] = {}
    owned: dict[int, list[tuple[int, Parents]]] = {}
    for segment in range(t):
        rows, columns = row_members(segment), column_members(segment, t)
        for side, members, size in ((False, rows, of_queries), (True, columns, of_keys)):
            for owner in rows + columns:
                parents = {x: owner for x in members if x != owner}
                found[segment, side, owner] = parents
                load[owner] = load.get(owner, 0) + size * len(parents)
                owned.setdefault(owner, []).append((size, parents))
    stars = {key: dict(parents) for key, parents in found.items()}
    most = max(load.values())
    queue = [(-much, rank) for rank, much in load.items()]
    heapify(queue)
    while queue:
        much, rank = heappop(queue)
        if -much != load[rank] or not (move := _best(rank, owned[rank], load)):
            continue
        size, parents, child, to = move
        parents[child] = to
        for x, change in ((rank, -size), (to, size)):
            load[x] += change
            heappush(queue, (-load[x], x))
    return found if most - max(load.values()) >= max(of_queries, of_keys) else stars


def _best(
    rank: int, owned: Sequence[tuple[int, Parents]], load: dict[int, int]
) -> tuple[int, Parents, int, int] | None:
    """The size and the tree of which a rank may hang a child on another one; None: no move helps.

    Children with children of their own stay: no row passes two members.
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
