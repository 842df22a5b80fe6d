"""Rings: every shard of keys and values passes every rank.

Ring Attention (Liu, Zaharia and Abbeel, arXiv:2310.01889): each step computes on one shard of K
and V.  Meanwhile the rank receives the next shard and sends this one on.  With the striped
distribution this is Striped Attention (arXiv:2311.09431).

Double-Ring-Attention (Gu et al., "LoongTrain", arXiv:2406.18485, section 4.3) has rings inside
groups of ranks, and a ring of these groups.  Rank p is member ``p % C`` of group ``p // C``.  In
a round, K and V go around the group.  During the round, the shard with which a rank began travels
to the same member of the next group, which begins its next round with it.  With a group on each
node, all ranks use the network all the time.  In a single ring, only the last rank of each node
does::

    R = 2, C = 3   member 0    member 1    member 2
         group 0  [ rank 0 -->  rank 1 -->  rank 2 ]  shards 0 1 2 in round 0, 3 4 5 in round 1
         group 1  [ rank 3 -->  rank 4 -->  rank 5 ]  shards 3 4 5 in round 0, 0 1 2 in round 1
                      inner hops: one each step; outer hops, downwards: one each round

If the mask hides pairs, a shard is cut to the keys that the ranks ahead still require, and goes no
further than the last of these ranks.

In the backward pass dK and dV follow their shard, one step behind.  A rank adds its gradients to
the gradients of the ranks before it.  The last rank that adds anything sends the sum of the group
back to the rank where the shard began its round.  The sum over groups travels to the next group
during the next round, and from the last group to the owner.  A simple ring has one group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache

from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Message, Rows

Ranks = Collection[int]
BACK = 1  # tag of gradients that return to the rank where their shard began its round


@lru_cache(maxsize=1 << 14)  # neighbours get the same object, which caches its hash
def around(first: int, number: int, size: int) -> Ranks:
    """Return `number` ranks from `first` on, around its ring of `size` consecutive ranks."""
    begin = first // size * size
    if first + number <= begin + size:
        return range(first, first + number)
    return frozenset(begin + (first + i) % size for i in range(number))


class Ring:
    """The rings of a rank: `groups` rings of `members` ranks each."""

    def __init__(self, p: Program) -> None:
        self.groups, self.members = p.group.rows, p.group.cols
        self.p, self.inner = p, "inner" if self.groups > 1 else "ring"
        self.group, self.member = divmod(p.rank, self.members)
        self.own = p.own("own kv", "kv", "given")
        # The previous and the next rank of each channel.
        self.around = {self.inner: (self.at(0, -1), self.at(0, 1))}
        if self.groups > 1:
            self.around["outer"] = (self.at(-1, 0), self.at(1, 0))
        for channel in self.around:
            p.channels[channel] = tuple(range(self.groups * self.members))

    def at(self, groups: int, members: int) -> int:
        """Return the rank that is `groups` groups and `members` members after this one."""
        group = (self.group + groups) % self.groups
        return group * self.members + (self.member + members) % self.members

    def ahead(self, first: int, number: int) -> Ranks:
        """Return `number` ranks of this ring, from `first` members after this rank on."""
        return around(self.at(0, first), number, self.members)

    def all_of(self, first: int, number: int) -> Ranks:
        """Return all ranks of `number` groups, from `first` groups after this one on."""
        begin, ranks = self.at(first, 0) - self.member, self.groups * self.members
        return around(begin, number * self.members, ranks)

    def required(self, owner: int, ranks: Ranks) -> Runs:
        """Return the places of the owner's keys that any of these ranks requires."""
        return self.p.group.required(True, owner, ranks)

    def slot(self, kind: str, use: str, turn: int, owner: int, places: Runs) -> Rows:
        """Declare rows for tokens of a shard, in one of two buffers in turn."""
        memory = f"{kind} {use} {turn % 2}"
        name = self.p.array(f"{kind} {use} {turn}", kind, [(owner, places)], memory=memory)
        return self.p.rows(name)

    def shift(self, channel: str, rows: Rows, following: Rows) -> list[Message | None]:
        """Send rows to the next rank, and receive rows from the previous rank."""
        before, after = self.around[channel]
        return [self.p.receive(channel, before, following), self.p.send(channel, after, rows)]

    def shards(self) -> Iterator[tuple[int, int, int, Rows]]:
        """Yield round, step, owner and rows of every shard, (n, Hkv, D); its own shard first.

        The rows are the keys that this rank or the ranks ahead require; there may be none.
        """
        p, first = self.p, self.own
        for r in range(self.groups):
            shard, leaving = first, []
            if left := self.groups - 1 - r:
                owner, following = self.at(-r, 0), self.at(-r - 1, 0)
                here = self.required(following, self.all_of(0, left))
                passed = p.rows(shard.array, owner, self.required(owner, self.all_of(1, left)))
                first = self.slot("kv", "outer", r, following, here)
                leaving = self.shift("outer", passed, first)
            for t in range(self.members):
                after, travelling, owner = shard, [], self.at(-r, -t)
                if left := self.members - 1 - t:
                    following = self.at(-r, -t - 1)
                    here = self.required(following, self.ahead(0, left))
                    passed = p.rows(shard.array, owner, self.required(owner, self.ahead(1, left)))
                    after = self.slot("kv", self.inner, r * self.members + t, following, here)
                    travelling = self.shift(self.inner, passed, after)
                yield r, t, owner, shard
                p.wait(travelling)
                shard = after
            p.wait(leaving)


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    q, out = p.own("own q", "q", "given"), p.own("out", "out", "result")
    for r, t, owner, shard in Ring(p).shards():
        if r == t == 0:
            p.attend(q, shard, out)
        elif p.group.required(True, owner, (p.rank,)):
            p.attend_and_merge(q, shard, out)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    ring = GradientRing(p)
    q, dq = p.own("own qd", "qd", "given"), p.own("dq", "dq")
    p.clear(dq)
    for r, t, owner, shard in ring.shards():
        dkv = ring.gradients(r, t, owner)
        p.clear(dkv)
        if seen := p.group.required(True, owner, (p.rank,)):
            keys = p.rows(shard.array, owner, seen)
            p.differentiate(q, keys, dq, p.rows(dkv.array, owner, seen))
        ring.pass_on(r, t, owner, dkv)
    p.results = {"dq": dq, "dkv": ring.finish()}


class GradientRing(Ring):
    """Rings in which dK and dV follow their shards, one step behind, and return to their owners.

    For example the gradients of shard 0 in a simple ring of four ranks, without a mask::

        step      0             1               2                   3
        computed  rank 0 keeps  rank 1          rank 2 adds         rank 3 adds
        sent                    rank 1 to 2     rank 2 to 3         rank 3 to 0, which adds its own
    """

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        self._travelling: list[Message | None] = []  # on inner hops
        # Receives of gradients of the shard that began its round here.
        self._returned: list[Message | None] = []
        # Sends of gradients of another shard to the rank where it began its round.
        self._returning: list[Message | None] = []
        self._leaving: list[Message | None] = []  # on outer hops
        self._arrived: Rows | None = None
        self._begun: Rows | None = None  # gradients of the shard that began this round here
        self._total: Rows | None = None

    def gradients(self, r: int, t: int, owner: int) -> Rows:
        """Declare rows for the gradients of a shard to which ranks have added so far."""
        if t == 0:
            return self.slot("dkv", "begun", r, owner, self.p.group.all_places(True, owner))
        places, turn = self.required(owner, self.ahead(1 - t, t)), r * self.members + t
        return self.slot("dkv", self.inner, turn, owner, places)

    def pass_on(self, r: int, t: int, owner: int, dkv: Rows) -> None:
        """Add the gradients of previous ranks; send the sum to the next rank, or back."""
        p, last = self.p, self.members - 1
        p.wait(self._travelling)
        p.wait(self._returning)
        if self._arrived:
            p.combine(self._arrived, p.matching(dkv.array, self._arrived))
        if t == 0:
            if r > 0:
                self._leave(r - 1)
            self._begun = dkv
            self._expect(r, owner)
        self._arrived, self._returning = None, []
        passed, arriving, ahead = Rows(dkv.array, ()), Rows("", ()), self.ahead(1, last - t)
        if t > 0:
            behind = self.ahead(1 - t, t)
            if self.required(owner, ahead):  # these ranks add to the sum
                passed = p.rows(dkv.array, owner, self.required(owner, behind))
            elif self.required(owner, self.ahead(0, 1)):  # this rank is the last one
                back = p.rows(dkv.array, owner, self.required(owner, behind))
                self._returning = [p.send(self.inner, self.at(0, -t), back, BACK)]
        if 0 < t < last:  # the gradients of the next shard arrive next
            following, turn = self.at(-r, -t - 1), r * self.members + t
            if self.required(following, self.ahead(0, last - t)):
                places = self.required(following, self.ahead(-t, t))
                arriving = self.slot("dkv", "arrived", turn, following, places)
                self._arrived = arriving if places else None
        self._travelling = self.shift(self.inner, passed, arriving)

    def finish(self) -> Rows:
        """Receive the remaining gradients; return the gradients of this rank's shard."""
        self.p.wait(self._travelling)
        self.p.wait(self._returning)
        if self.groups == 1:
            self._collect()
            return self._begun
        self._leave(self.groups - 1)
        self.p.wait(self._leaving)
        return self._total

    def _expect(self, r: int, owner: int) -> None:
        """Post the receives of gradients of the shard that begins a round here."""
        self._returned = []
        for t in range(1, self.members):  # any of these ranks may be the last that adds anything
            ahead = self.ahead(t + 1, self.members - 1 - t)
            if self.required(owner, self.ahead(t, 1)) and not self.required(owner, ahead):
                name = f"dkv back {r * self.members + t}"
                places = self.required(owner, self.ahead(1, t))
                self.p.array(name, "dkv", [(owner, places)], memory="dkv back")
                rows = self.p.rows(name)
                self._returned.append(self.p.receive(self.inner, self.at(0, t), rows, BACK))

    def _collect(self) -> None:
        """Add the received gradients of the shard that began its round here."""
        for message in filter(None, self._returned):
            self.p.wait([message])
            rows = message.rows
            self.p.combine(rows, self.p.matching(self._begun.array, rows))

    def _leave(self, r: int) -> None:
        """Send the gradients of the shard that began a round here, summed over groups so far."""
        p, owner, following = self.p, self.at(-r, 0), self.at(-r - 1, 0)
        self._collect()
        p.wait(self._leaving)
        total = self.slot("dkv", "outer", r, owner, p.group.all_places(True, owner))
        (p.copy if r == 0 else p.combine)(self._begun, total)
        places = p.group.all_places(True, following)
        self._total = self.slot("dkv", "outer", r + 1, following, places)
        self._leaving = self.shift("outer", total, self._total)


def _double(layout: Layout) -> tuple[int, int]:
    if layout.cols == 1:  # groups of one rank form a single ring
        return 1, layout.positions
    return layout.rows, layout.cols


def _suits_double(layout: Layout) -> bool:
    """Return True for two or more rings of two or more ranks, if world ranks follow inner rings.

    Inner rings whose ranks are farther apart than the ranks of outer rings have no advantage.
    """
    farther = layout.order.index("c") < layout.order.index("r")
    return min(layout.rows, layout.cols) > 1 and not farther


RING = Method(
    forward,
    backward,
    group_shape=lambda layout: (1, layout.positions),
    suits=lambda layout: layout.cols == 1 < layout.rows,
    ring=True,
)
STRIPED_RING = RING._replace(distribution="striped")
DOUBLE_RING = RING._replace(group_shape=_double, suits=_suits_double)
