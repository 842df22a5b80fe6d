"""The clock and the links of all ranks while they go through schedules, step by step.

All arrays have one entry per logical rank (see `a2d_mpi.core.sizes.Layout`): schedules are those
of all ranks at once, and in each step every rank has one peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.machine import Machine
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import chunk_of, identity
from a2d_mpi.schedules.steps import Message

Spans = list[tuple[str, float, float]]  # part, begin and end of all that a rank does, in order
FEW = 8  # messages, of different sizes, that are summed one by one
PARTS = ("compute", "merge", "wait", "other")


class Clock:
    """Seconds of every rank since a phase began.

    Parameters
    ----------
    ranks : int
    spans : list of Spans, optional
        Gets everything, by rank.

    Attributes
    ----------
    now : (P,) float64
    parts : dict of str to (P,) float64
        The time that went to each of `PARTS`.
    """

    def __init__(self, ranks: int, spans: list[Spans] | None = None) -> None:
        self.now, self._idle = np.zeros(ranks), np.zeros(ranks)
        self.parts = {part: np.zeros(ranks) for part in PARTS}
        self._spans = spans

    def spend(self, part: str, seconds: np.ndarray | float) -> None:
        """Every rank is busy."""
        self.parts[part] += seconds
        self._go(part, self.now + seconds)

    def wait(self, done: np.ndarray, work: np.ndarray | float) -> None:
        """Every rank waits until something has arrived, working for that if it must.

        It has done that work while it was waiting for this, or for what came before.
        """
        ready = np.maximum(self.now, done)
        self._idle = self._idle + (ready - self.now)
        if np.ndim(work) or work:
            paid = np.minimum(self._idle, work)
            self._idle = self._idle - paid
            ready += work - paid
        self.parts["wait"] += ready - self.now
        self._go("wait", ready)

    def _go(self, part: str, to: np.ndarray) -> None:
        if self._spans is not None:
            for spans, begin, end in zip(self._spans, self.now.tolist(), to.tolist()):
                record(spans, part, begin, end)
        self.now = to


def record(spans: Spans, part: str, begin: float, end: float) -> None:
    """Add to a rank's spans, or prolong the last one."""
    if spans and spans[-1][0] == part:
        spans[-1] = part, spans[-1][1], end
    elif end > begin or not spans:
        spans.append((part, begin, end))


@dataclass(eq=False)
class Route:
    """The links from every rank to one peer of each.

    Attributes
    ----------
    to : (P,) int
    kind : int or (P,) int
        0: inside a node, 1: between nodes; one number if all are alike.
    back : Route or None
        From every rank to the one whose peer it is; found when it is asked for.
    """

    to: np.ndarray
    kind: int | np.ndarray
    back: Route | None = field(default=None, repr=False)

    @property
    def index(self) -> tuple:
        """Index of these links in (2, P) arrays."""
        whole = isinstance(self.kind, int)
        return self.kind, slice(None) if whole else np.arange(len(self.to))


class _Crowd:
    """Messages that leave together: a link carries as much to all peers, or all that there is."""

    def __init__(self) -> None:
        # Bytes to a peer, and the number of such peers inside a rank's node and in others.
        self.sizes: list[Ranks] = []
        self._peers: list[tuple[Ranks, Ranks]] = []
        self._sorted: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, size: Ranks, peers: tuple[Ranks, Ranks]) -> None:
        """Add messages of one size."""
        self.sizes.append(size)
        self._peers.append(peers)

    def moved(self, kind: int, ahead: Ranks) -> Ranks:
        """Bytes that have left by a kind of link once every peer got so many, or all of its."""
        if len(self.sizes) <= FEW:
            return sum(n[kind] * np.minimum(x, ahead) for x, n in zip(self.sizes, self._peers))
        if kind not in self._sorted:
            columns = np.broadcast_arrays(*self.sizes, *(n[kind] for n in self._peers))
            sizes, peers = np.array(columns, float).reshape(2, len(self.sizes), -1)
            order = np.argsort(sizes, axis=0)
            sizes, peers = (np.take_along_axis(x, order, axis=0) for x in (sizes, peers))
            none = np.zeros_like(sizes[:1])
            gone = np.concatenate([none, np.cumsum(sizes * peers, axis=0)])
            left = peers.sum(axis=0) - np.concatenate([none, np.cumsum(peers, axis=0)])
            self._sorted[kind] = sizes, gone, left
        sizes, gone, left = self._sorted[kind]
        done = (sizes < ahead).sum(axis=0, keepdims=True)
        gone, left = (np.take_along_axis(x, done, axis=0)[0] for x in (gone, left))
        return gone + left * ahead


@dataclass(eq=False)
class Post:
    """A message of every rank that was posted: to whom it goes, or from whom it comes."""

    route: Route  # to the peer
    nbytes: Ranks
    when: np.ndarray | None = None
    done: np.ndarray | None = None
    work: np.ndarray | float = 0.0  # s of the receiver's core


class Links:
    """The messages of all ranks.

    What is posted together arrives as if every peer got an equal part of the link; messages to
    one peer follow each other, and what is sent later queues behind it.  So it is at the sender
    and at the receiver, each for itself, and the later of both is when a message has arrived.  The
    ranks of a node share its NICs by what they have to send to other nodes, and to receive.  A
    message leaves when both sides have posted it.

    Parameters
    ----------
    machine : Machine
    layout : Layout
    clock : Clock
    """

    def __init__(self, machine: Machine, layout: Layout, clock: Clock) -> None:
        self._machine, self._clock, self._size = machine, clock, layout.size
        self._node = layout.physical() // machine.ranks_per_node
        self._links = machine.links(layout.size)
        self._latency, self._overhead, self._unhidden = (
            np.array(x) for x in zip(*((x.latency, x.overhead, 1 - x.hidden) for x in self._links))
        )
        self._routes: dict[bytes, Route] = {}
        self._known: dict[int, tuple[Ranks, Route]] = {}
        # Of what a rank sends and receives, inside and between nodes: bytes/s, and when all of it
        # that was posted has passed.
        self._rate = np.ones((2, 2, layout.size))
        self._free = np.zeros((2, 2, layout.size))

    def begin(self, schedule: Schedule, nbytes: dict[Message, Ranks]) -> None:
        """Set out on a schedule, with the bytes of each message."""
        self._schedule, self._nbytes, self._known = schedule, nbytes, {}
        self._posts: dict[Message, Post] = {}
        self._batch: list[Message] = []
        self._overheads: np.ndarray | float = 0.0
        # Posted by one side only: those to be received, and those sent.
        self._open: tuple[dict[tuple, list[Post]], ...] = ({}, {})
        crossing = np.zeros((2, self._size))
        for message, size in nbytes.items():
            crossing[int(not message.sent)] += size * self._route(message.peer).kind
        of_node = np.array([np.bincount(self._node, x)[self._node] for x in crossing])
        fair = np.where(crossing > 0, crossing / np.maximum(of_node, 1e-300), 1.0)
        inside, link = self._links
        alone = link.bandwidth * max(1.0, link.nics / self._machine.ranks_per_node)
        self._rate[:, 0] = inside.bandwidth
        self._rate[:, 1] = np.minimum(alone, link.bandwidth * link.nics * fair)

    def post(self, message: Message, tensors: int) -> None:
        """Every rank posts a message of so many tensors, which leaves with those posted next."""
        route = self._route(message.peer)
        self._posts[message] = Post(route, self._nbytes[message])
        self._batch.append(message)
        # A rank without bytes has no message.
        overhead = tensors * self._overhead[route.kind] * (np.asarray(self._nbytes[message]) > 0)
        self._overheads = self._overheads + overhead

    def wait(self, messages: Sequence[Message]) -> None:
        """Every rank waits for messages."""
        self.depart()
        posts = [self._posts.pop(message) for message in messages]
        done, work = posts[0].done, posts[0].work
        for post in posts[1:]:
            done, work = np.maximum(done, post.done), work + post.work
        self._clock.wait(done, work)

    def finish(self) -> None:
        """Every rank waits until all its messages have left."""
        self.depart()
        done = [post.done for message, post in self._posts.items() if message.sent]
        if done:
            self._clock.wait(np.max(done, axis=0), 0.0)

    def depart(self) -> None:
        """Let the messages leave, together, that were posted since the last time."""
        if not self._batch:
            return
        self._clock.spend("other", self._overheads)
        flows = self._flows()
        self._batch, self._overheads = [], 0.0
        # Alike: as many bytes in the same messages, which are looked at once.
        alike: dict[tuple, list[Route]] = defaultdict(list)
        for route, pairs in flows.items():
            key = tuple(identity(post.nbytes) for pair in pairs for post in pair)
            alike[key].append(route)
        crowds = _Crowd(), _Crowd()
        if len(flows) > 1:
            for routes in alike.values():
                for side, crowd in enumerate(crowds):
                    far = sum((self._back(x) if side else x).kind for x in routes)
                    size = sum(pair[side].nbytes for pair in flows[routes[0]])
                    crowd.add(size, (len(routes) - far, far))
        last = self._free.copy()
        for routes in alike.values():
            ahead: list[Ranks] = [0, 0]
            for i, pair in enumerate(flows[routes[0]]):
                ahead = [x + post.nbytes for x, post in zip(ahead, pair)]
                seconds: dict[tuple[int, int], np.ndarray] = {}
                for route in routes:
                    for side, kind in product(
                        (0, 1), (0, 1) if np.ndim(route.kind) else (route.kind,)
                    ):
                        if (side, kind) not in seconds:
                            moved = ahead[side]
                            if crowds[side].sizes:
                                moved = crowds[side].moved(kind, moved)
                            seconds[side, kind] = moved / self._rate[side, kind]
                    self._arrive(route, *flows[route][i], seconds, last)
        self._free = last

    def _flows(self) -> dict[Route, list[tuple[Post, Post]]]:
        """The messages to each peer that both sides have posted now: as sent, and as received."""
        flows: dict[Route, list[tuple[Post, Post]]] = {}
        for message in self._batch:
            post = self._posts[message]
            post.when = self._clock.now
            # Both sides know a message by its channel, its rows and the way that it takes.
            way = post.route if message.sent else self._back(post.route)
            kind = self._schedule.arrays[message.rows.array].kind
            key = message.channel, message.tag, kind, chunk_of(message.rows.part), way
            others = self._open[not message.sent].get(key)
            if others:
                other = others.pop(0)
                pair = (post, other) if message.sent else (other, post)
                flows.setdefault(way, []).append(pair)
            else:
                self._open[message.sent].setdefault(key, []).append(post)
        return flows

    def _arrive(
        self,
        route: Route,
        sent: Post,
        received: Post,
        seconds: dict[tuple[int, int], np.ndarray],
        last: np.ndarray,
    ) -> None:
        """A message of every rank arrives, after so many seconds on each side's links."""
        back = self._back(route)
        ready = np.maximum(sent.when, received.when[route.to])
        is_one = np.asarray(sent.nbytes) > 0
        passed = []
        for side, way, when, some in (
            (0, route, ready, is_one),
            (1, back, ready[back.to], np.asarray(received.nbytes) > 0),
        ):
            taken = (
                seconds[side, way.kind]
                if isinstance(way.kind, int)
                else np.where(way.kind, seconds[side, 1], seconds[side, 0])
            )
            index = side, *way.index
            passed.append((np.maximum(when, self._free[index]) + taken) * some)
            last[index] = np.maximum(last[index], passed[side])
        sent.done = np.maximum(passed[0], passed[1][route.to])
        sent.done = sent.done + self._latency[route.kind] * is_one
        received.done = sent.done[back.to]
        if self._unhidden.any():
            work = self._unhidden[route.kind] * (sent.nbytes / self._rate[0][route.index])
            received.work = work[back.to]

    def _route(self, peer: Ranks) -> Route:
        """The links to a peer of the schedule."""
        if id(peer) not in self._known:  # kept with it: no other gets the same id
            self._known[id(peer)] = peer, self._to(self._schedule.logical(peer))
        return self._known[id(peer)][1]

    def _to(self, to: np.ndarray) -> Route:
        key = to.tobytes()
        if key not in self._routes:
            far = (self._node[to] != self._node).astype(int)
            kind = int(far[0]) if far.min() == far.max() else far
            self._routes[key] = Route(to, kind)
        return self._routes[key]

    def _back(self, route: Route) -> Route:
        if route.back is None:
            route.back = self._to(np.argsort(route.to))
            route.back.back = route
        return route.back
