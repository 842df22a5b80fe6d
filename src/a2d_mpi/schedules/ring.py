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

Where the mask hides pairs, a block is cut to the tokens that the ranks still ahead need, and goes
no further than the last of these.

In the backward pass dK and dV follow their block, one step behind.  A rank adds to those of the
ranks before it, and the last rank that adds anything sends the sum back to the rank where the
block began its round: that is what the group adds to the gradients.  The sum over groups travels
to the next one during that one's next round, and from the last one home.  A ring is the case of
one group.
"""

from __future__ import annotations

from collections.abc import Iterator

from a2d_mpi.core.meetings import Around, Others, Ranks
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import Attend, Copy, Merge, Message, Rows, Zero

BACK = 1  # tag of gradients on their way back


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
        self._ranks: dict[tuple[int, int], Ranks] = {(0, 0): s.rank}
        # The rank before this one, and the one after it.
        self.around = {self.inner: (self.at(0, -1), self.at(0, 1))}
        s.channels[self.inner] = ranks
        if self.groups > 1:
            self.around["outer"] = (self.at(-1, 0), self.at(1, 0))
            s.channels["outer"] = ranks
        s.array("own kv", "kv", (s.rank,), "given")

    def at(self, groups: int, places: int) -> Ranks:
        """The rank so many groups and places after this one."""
        key = groups % self.groups, places % self.places
        if key not in self._ranks:  # each once: equal ranks are the same object
            place = (self.place + key[1]) % self.places
            self._ranks[key] = (self.group + key[0]) % self.groups * self.places + place
        return self._ranks[key]

    def line(self, first: int, number: int) -> Around:
        """So many ranks of this group, the first of them so many places after this one."""
        return Around(self.at(0, first), number, self.places)

    def all_of(self, first: int, number: int) -> Around:
        """All ranks of so many groups, the first of them so many groups after this one."""
        whole = self.groups * self.places
        first_rank = (self.group + first) % self.groups * self.places
        return Around(first_rank, number * self.places, whole)

    def slot(self, kind: str, use: str, turn: int, meets: Others | None = None) -> str:
        """An array for the tokens of a block that meet others, in one of two buffers in turn."""
        room = f"{kind} {use} {turn % 2}"
        return self.s.array(f"{kind} {use} {turn}", kind, meets=meets, room=room)

    def shift(self, channel: str, rows: Rows | None, following: Rows | None) -> list[Message]:
        """Pass rows on and get the following ones, as far as there are any."""
        before, after = self.around[channel]
        posted = []
        if following is not None:
            posted.append(self.s.receive(channel, before, following))
        if rows is not None:
            posted.append(self.s.send(channel, after, rows))
        return self.s.exchange(*posted)

    def blocks(self) -> Iterator[tuple[int, int, str, Ranks]]:
        """Yield round, step, array and owner of every block, (n, Hkv, D) each; the own first.

        Of a block those tokens are here that this rank or those ahead need; there may be none.
        """
        s, first = self.s, "own kv"
        for r in range(self.groups):
            block, leaving, owner, following = first, [], self.at(-r, 0), self.at(-r - 1, 0)
            if left := self.groups - 1 - r:
                here, there = (self.all_of(i, left) for i in (0, 1))
                first = self.slot("kv", "outer", r, here)
                passed, coming = s.some(block, owner, there), s.some(first, following, here)
                leaving = self.shift("outer", passed, coming)
            for t in range(self.places):
                after, travelling = block, []
                owner, following = self.at(-r, -t), self.at(-r, -t - 1)
                if left := self.places - 1 - t:
                    here, there = (self.line(i, left) for i in (0, 1))
                    after = self.slot("kv", self.inner, r * self.places + t, here)
                    passed, coming = s.some(block, owner, there), s.some(after, following, here)
                    travelling = self.shift(self.inner, passed, coming)
                yield r, t, block, owner
                s.wait(travelling)
                block = after
            s.wait(leaving)


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    q = Rows(s.array("own q", "q", (s.rank,), "given"), s.rank)
    out = Rows(s.array("out", "out", (s.rank,), "result"), s.rank)
    for r, t, block, owner in Ring(s).blocks():
        if r == t == 0 or s.some(block, owner, (s.rank,)):
            s.add(Attend(q, Rows(block, owner), out))
    s.results = {"out": out}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    gradients = Gradients(ring := Ring(s))
    q = Rows(s.array("own qd", "qd", (s.rank,), "given"), s.rank)
    dq = Rows(s.array("dq", "dq", (s.rank,)), s.rank)
    s.add(Zero(dq))
    for r, t, block, owner in ring.blocks():
        dkv = gradients.rows(r, t, owner)
        keys = s.some(block, owner, (s.rank,))
        s.add(Zero(dkv))
        if keys:
            s.add(Attend(q, keys, dq, keys._replace(array=dkv.array)))
        gradients.pass_on(r, t, dkv)
    s.results = {"dq": dq, "dkv": gradients.finish()}


class Gradients:
    """dK and dV of the blocks, on their way round and home."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.s = ring, ring.s
        self._travelling: list[Message] = []  # on inner hops
        self._returned: list[Message] = []  # to where their block began its round
        self._returning: list[Message] = []
        self._leaving: list[Message] = []  # on outer hops
        self._arrived: Rows | None = None
        self._begun: Rows | None = None  # of the block that began this round here
        self._total: Rows | None = None

    def rows(self, r: int, t: int, owner: Ranks) -> Rows:
        """Rows for the gradients of a block, as far as the ranks so far have added to them."""
        if t == 0:
            return Rows(self.ring.slot("dkv", "begun", r), owner)
        behind, turn = self.ring.line(1 - t, t), r * self.ring.places + t
        return Rows(self.ring.slot("dkv", self.ring.inner, turn, behind), owner)

    def pass_on(self, r: int, t: int, dkv: Rows) -> None:
        """Add what the ranks before this one found, and pass the sum on or send it back."""
        s, ring, last = self.s, self.ring, self.ring.places - 1
        s.wait(self._travelling)
        s.wait(self._returning)
        if self._arrived:
            s.add(Merge(self._arrived, self._arrived._replace(array=dkv.array)))
        if t == 0:
            if r > 0:
                self._leave(r - 1)
            self._begun = dkv
            self._expect(r)
        self._arrived = passed = returned = None
        ahead = ring.line(1, last - t)
        if t > 0:
            behind, me = ring.line(1 - t, t), ring.line(0, 1)
            passed = s.some(dkv.array, dkv.owner, behind, ahead)
            returned = s.some(dkv.array, dkv.owner, behind, me, ahead)
        if 0 < t < last:  # the next to come are those of the next block
            behind, turn = ring.line(-t, t), r * ring.places + t
            name = ring.slot("dkv", "arrived", turn, behind)
            self._arrived = s.some(name, ring.at(-r, -t - 1), behind, ring.line(0, last - t))
        self._travelling = ring.shift(ring.inner, passed, self._arrived)
        self._returning = []
        if returned:
            self._returning = s.exchange(s.send(ring.inner, ring.at(0, -t), returned, BACK))

    def finish(self) -> Rows:
        """Get the rest; returns this rank's own gradients."""
        s, ring = self.s, self.ring
        s.wait(self._travelling)
        s.wait(self._returning)
        if ring.groups == 1:
            self._collect()
            return self._begun
        self._leave(ring.groups - 1)
        s.wait(self._leaving)
        return self._total

    def _expect(self, r: int) -> None:
        """Post the receive of what other ranks add to the block that begins a round here."""
        s, ring, last = self.s, self.ring, self.ring.places - 1
        self._returned = []
        for t in range(1, ring.places):  # whichever rank is the last to add anything
            behind, ahead = ring.line(1, t), ring.line(t + 1, last - t)
            name = f"dkv back {r * ring.places + t}"
            s.array(name, "dkv", meets=behind, room="dkv back")
            if rows := s.some(name, self._begun.owner, behind, ring.line(t, 1), ahead):
                self._returned.append(s.receive(ring.inner, ring.at(0, t), rows, BACK))

    def _collect(self) -> None:
        for message in self._returned:
            self.s.wait([message])
            self.s.add(Merge(message.rows, message.rows._replace(array=self._begun.array)))

    def _leave(self, r: int) -> None:
        """Pass on the sum of the groups so far for the block that began a round."""
        s, ring = self.s, self.ring
        self._collect()
        s.wait(self._leaving)
        total = Rows(ring.slot("dkv", "outer", r), ring.at(-r, 0))
        s.add(Copy(self._begun, total) if r == 0 else Merge(self._begun, total))
        self._total = Rows(ring.slot("dkv", "outer", r + 1), ring.at(-r - 1, 0))
        self._leaving = ring.shift("outer", total, self._total)


def _tiles(layout: Layout) -> tuple[int, int]:
    """Give every rank its queries and all keys."""
    return layout.positions, 1


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
    tiles=_tiles,
    known_as=lambda layout: "USP" if layout.heads > 1 else "",
)
STRIPED_RING = RING._replace(distribution="striped", known_as=lambda layout: "")
DOUBLE_RING = Method(forward, backward, _double, suits=_suits_double, tiles=_tiles)
