"""Rings: every key and value passes every rank.

Ring Attention (Liu, Zaharia and Abbeel, arXiv:2310.01889): each step computes on one block of K
and V while the next one arrives and this one travels on.  With the striped distribution it is
Striped Attention (arXiv:2311.09431).

Double-Ring-Attention (Gu et al., "LoongTrain", arXiv:2406.18485, section 4.3): rings inside groups
of ranks, and a ring of these groups.  Rank p is at place ``p % C`` of group ``p // C``.  K and V
go round the group; meanwhile, for as long as that takes, the block that a rank began with travels
to the same place in the next group, which begins its next round with it.  With a group on each
node all ranks use the network all the time, instead of the last of each node only.

    R = 2, C = 3   place 0     place 1     place 2
         group 0  [ rank 0 -->  rank 1 -->  rank 2 ]  blocks 0 1 2 in round 0, 3 4 5 in round 1
         group 1  [ rank 3 -->  rank 4 -->  rank 5 ]  blocks 3 4 5 in round 0, 0 1 2 in round 1
                      inner hops: one each step; outer hops, downwards: one each round

In the backward pass dK and dV follow their block, one step behind.  After a round they make one
more inner hop, to where the block began it: that is what the group adds to the gradients.  The sum
over groups travels to the next one during that one's next round, and from the last one home.  A
ring is the case of one group.
"""

from __future__ import annotations

from collections.abc import Iterator

from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.sizes import Ranks
from a2d_mpi.schedules.steps import Attend, Copy, Merge, Message, Rows, Schedule, Zero


class Ring:
    """The rings around a rank: `groups` of them, of `places` ranks each.

    Parameters
    ----------
    s : Schedule
    """

    def __init__(self, s: Schedule) -> None:
        self.s, self.inner = s, s.sizes.inner
        self.groups, self.places = s.sizes.rows, s.sizes.cols
        self.group, self.place = s.rank // self.places, s.rank % self.places
        ranks = tuple(range(self.groups * self.places))
        self._owners: dict[tuple[int, int], Ranks] = {(0, 0): s.rank}
        # The rank before this one, and the one after it.
        self.around = {self.inner: (self.owner(0, 1), self.owner(0, -1))}
        s.channels[self.inner] = ranks
        if self.groups > 1:
            self.around["outer"] = (self.owner(1, 0), self.owner(-1, 0))
            s.channels["outer"] = ranks
        s.array("own kv", "kv", (s.rank,), "given")

    def owner(self, round_: int, step: int) -> Ranks:
        """Owner of the block that this rank has at a step: so many places before it."""
        back = round_ % self.groups, step % self.places
        if back not in self._owners:  # each once: equal owners are the same object
            place = (self.place - back[1]) % self.places
            self._owners[back] = (self.group - back[0]) % self.groups * self.places + place
        return self._owners[back]

    def slot(self, kind: str, use: str, turn: int, owner: Ranks) -> Rows:
        """One of two arrays in turn, for a block of the owner."""
        return Rows(self.s.array(f"{kind} {use} {turn % 2}", kind), owner)

    def shift(self, channel: str, rows: Rows, following: Rows) -> list[Message]:
        """Pass rows on and get the following ones."""
        before, after = self.around[channel]
        received = self.s.receive(channel, before, following)
        return self.s.exchange(received, self.s.send(channel, after, rows))

    def blocks(self) -> Iterator[tuple[int, int, Rows]]:
        """Yield round, step and k, v of every block, (n, Hkv, D) each; this rank's own first."""
        first = Rows("own kv", self.s.rank)
        for r in range(self.groups):
            block, leaving = first, []
            if r < self.groups - 1:
                first = self.slot("kv", "outer", r, self.owner(r + 1, 0))
                leaving = self.shift("outer", block, first)
            for t in range(self.places):
                following, travelling = block, []
                if t < self.places - 1:
                    following = self.slot("kv", self.inner, t, self.owner(r, t + 1))
                    travelling = self.shift(self.inner, block, following)
                yield r, t, block
                self.s.wait(travelling)
                block = following
            self.s.wait(leaving)


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    q = Rows(s.array("own q", "q", (s.rank,), "given"), s.rank)
    out = Rows(s.array("out", "out", (s.rank,), "result"), s.rank)
    for _, _, block in Ring(s).blocks():
        s.add(Attend(q, block, out))
    s.results = {"out": out}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    ring = Ring(s)
    q = Rows(s.array("own qd", "qd", (s.rank,), "given"), s.rank)
    dq = Rows(s.array("dq", "dq", (s.rank,)), s.rank)
    s.add(Zero(dq))
    travelling: list[Message] = []  # gradients on inner hops, and on outer ones
    leaving: list[Message] = []
    arrived = total = None  # what they bring: sums over ranks of a group, over groups

    def leave(round_: int) -> None:
        """Pass on what the groups so far added to the block that began a round."""
        nonlocal leaving, total
        s.wait(leaving)
        total = ring.slot("dkv", "outer", round_, ring.owner(round_, 0))
        # Copied: the next round's gradients arrive where these are.
        s.add(Copy(arrived, total) if round_ == 0 else Merge(arrived, total))
        following = ring.slot("dkv", "outer", round_ + 1, ring.owner(round_ + 1, 0))
        leaving = ring.shift("outer", total, following)
        total = following

    for step, (r, t, block) in enumerate(ring.blocks()):
        dkv = ring.slot("dkv", ring.inner, step, block.owner)
        s.add(Zero(dkv), Attend(q, block, dq, dkv))
        # What the ranks before this one added to the block's gradients comes while it computes.
        # At the beginning of a round: those of the block with which it began the last one.
        s.wait(travelling)
        if t > 0:
            s.add(Merge(arrived, dkv))
        elif r > 0:
            leave(r - 1)
        # The next to come are those of the next block, at last of the round's first.
        arrived = ring.slot("dkv", "arrived", step, ring.owner(r, t + 1))
        travelling = ring.shift(ring.inner, dkv, arrived)
    s.wait(travelling)
    if ring.groups > 1:
        leave(ring.groups - 1)
        s.wait(leaving)
    s.results = {"dq": dq, "dkv": arrived if total is None else total}


def _double(layout: Layout) -> tuple[int, int, str]:
    if layout.cols == 1:  # groups of one rank are themselves one ring, whose hops are outer ones
        return 1, layout.positions, "outer"
    return layout.rows, layout.cols, "inner"


def _suits_double(layout: Layout) -> bool:
    """Two rings of two ranks at least, and the inner ones never spread wider than the outer."""
    wider = layout.order.index("c") < layout.order.index("r")
    return min(layout.rows, layout.cols) > 1 and not wider


RING = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, "ring"),
    suits=lambda layout: layout.cols == 1 < layout.rows,
    known_as=lambda layout: "USP" if layout.heads > 1 else "",
)
STRIPED_RING = RING._replace(distribution="striped", known_as=lambda layout: "")
DOUBLE_RING = Method(forward, backward, _double, suits=_suits_double)
