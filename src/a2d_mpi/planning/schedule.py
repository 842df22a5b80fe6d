"""The clock and the links of all ranks while they follow a schedule of `a2d_mpi.planning.model`.

All arrays have one entry per logical rank (see `a2d_mpi.core.sizes.Layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.core.masks import Full, Mask
from a2d_mpi.core.pairs import by_rows, visible_pairs
from a2d_mpi.core.sizes import LARGEST, Layout, Problem, check_sizes
from a2d_mpi.planning.machine import PHASES, KernelModel, Machine

PARTS = ("compute", "merge", "wait", "other")
# When something has arrived, s, and what that takes of the receiver's core, s.
Hop = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Workload:
    """What is to be computed: the arguments of an `AttentionPlan`, by the same names.

    `backward`: also the gradients.
    """

    seqlen: int
    nheads: int
    headdim: int
    nheads_kv: int | None = None
    mask: Mask = field(default_factory=Full)
    dtype: str = "bfloat16"
    backward: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.nheads_kv is None:
            object.__setattr__(self, "nheads_kv", self.nheads)
        check_sizes(**{name: getattr(self, name) for name in LARGEST})
        as_dtype(self.dtype)

    @property
    def phases(self) -> tuple[str, ...]:
        """What is timed."""
        return PHASES if self.backward else PHASES[:1]

    def distribution(self, method: str) -> str:
        """The distribution that a method takes for the mask."""
        return "striped" if method == "striped ring" else self.mask.default_distribution

    def problem(self, layout: Layout, distribution: str) -> Problem:
        """Sizes for the formulas of `a2d_mpi.planning.cost`."""
        whole = Distribution(distribution, self.seqlen, layout.size, layout.heads)
        sizes = (self.nheads, self.nheads_kv, self.headdim)
        dtype = as_dtype(self.dtype)
        return Problem(_counts(whole), *sizes, dtype.itemsize, compute_dtype(dtype).itemsize)


@lru_cache(maxsize=64)
def _counts(whole: Distribution) -> tuple[int, ...]:
    return whole.counts


@lru_cache(maxsize=2)  # both phases of layouts that differ in shape only
def _pair_seconds(
    kernel: KernelModel,
    mask: Mask,
    parts: Distribution,
    heads: tuple[int, int, int],
    backward: bool,
    share: float,
) -> np.ndarray:
    """Of the kernel for queries of one part and keys of another, by share of a core."""
    area, cut = visible_pairs(mask, parts)
    counts = np.array(_counts(parts))
    found = np.empty(area.shape)
    for rows in by_rows(parts.nshards):
        sizes = area[rows], counts[rows, None], counts[None, :], cut[rows]
        found[rows] = kernel.seconds(*sizes, heads, backward) / share
    return found


@dataclass(frozen=True)
class Route:
    """Links from every rank to another.

    Attributes
    ----------
    to : (P,) int
    kind : int or (P,) int
        0: inside a node, 1: between nodes; one number if all are alike.
    mine : tuple
        Index of these links in (2, P) arrays.
    """

    to: np.ndarray
    kind: int | np.ndarray
    mine: tuple


class Schedule:
    """All ranks at the beginning of one phase; `now` is the time of each, in seconds.

    Parameters
    ----------
    machine : Machine
    layout : Layout
    work : Workload
    distribution : str
    phase : {"forward", "backward"}
    """

    def __init__(
        self, machine: Machine, layout: Layout, work: Workload, distribution: str, phase: str
    ) -> None:
        self.machine, self.layout, self.distribution = machine, layout, distribution
        self.backward, self.overlap = phase == "backward", work.overlap
        self.kernel = machine.kernel(work.dtype, phase)
        self.share = share = machine.share
        self.step, self.turn = machine.step / share, machine.turn / share
        self.links = machine.links(layout.size)
        self.whole = work.problem(layout, distribution)
        self.layer = p = self.whole.context_group(layout.heads)
        self.heads = (p.nheads, p.nheads_kv, p.headdim)
        self.rows, self.cols = layout.rows, layout.cols
        self.cell, self.u = np.divmod(np.arange(layout.size), layout.heads)
        self.row, self.col = np.divmod(self.cell, self.cols)
        self.node = layout.physical() // machine.ranks_per_node
        self.own = np.array(self.whole.counts)  # tokens of a rank, by rank
        self.counts = np.array(p.counts)  # tokens of a cell, by cell
        self.n = self.counts[self.cell]
        cells = Distribution(distribution, work.seqlen, layout.positions)
        self.area, self.cut = visible_pairs(work.mask, cells)
        self.pair = _pair_seconds(
            self.kernel, work.mask, cells, self.heads, self.backward, self.share
        )
        self.latency, self.overhead, self.unhidden = (
            np.array(x) for x in zip(*((x.latency, x.overhead, 1 - x.hidden) for x in self.links))
        )
        self.now = np.zeros(layout.size)
        self.idle = np.zeros(layout.size)  # waited so far, s, and did nothing meanwhile
        self.parts = {part: np.zeros(layout.size) for part in PARTS}
        self.rate = np.ones((2, layout.size))  # bytes/s that I have inside and between nodes
        self.free = np.zeros((2, layout.size))  # when all that I send there has left

    def walk(self) -> dict[str, np.ndarray]:
        """Go through the whole phase; returns the seconds of each of `PARTS`, (P,) each."""
        p, q, kv = self.layer, self.layer.q, self.layer.kv
        dkv = p.dkv if self.whole.nheads_kv < self.layout.heads else kv
        there, back = (2 * q + 2 * p.lse + kv, q + dkv) if self.backward else (q + kv, q + p.lse)
        self.spend("other", self.machine.start)
        if self.backward:  # delta
            self.spend("compute", self.copying(2 * self.own * self.whole.q))
        self.exchange(there, to_layers=True)
        self.run()
        self.exchange(back, to_layers=False)
        return self.parts

    def run(self) -> None:
        """The schedule of a layer."""
        raise NotImplementedError

    def at(self, row: np.ndarray, col: np.ndarray) -> np.ndarray:
        """Logical rank at (row, col) of my layer, indices taken round."""
        return ((row % self.rows) * self.cols + col % self.cols) * self.layout.heads + self.u

    def spend(self, part: str, seconds: np.ndarray | float) -> None:
        """Every rank is busy."""
        self.now = self.now + seconds
        self.parts[part] += seconds

    def wait(self, hop: Hop) -> None:
        """Every rank waits until something has arrived, working for that if it must.

        It has done that work while it was waiting for this, or for what came before.
        """
        done, due = hop
        self.idle = self.idle + np.maximum(done - self.now, 0)
        paid = np.minimum(self.idle, due)
        self.idle = self.idle - paid
        ready = np.maximum(self.now, done) + due - paid
        self.parts["wait"] += ready - self.now
        self.now = ready

    def compute(self, area: np.ndarray, nq: np.ndarray, nk: np.ndarray, cut: np.ndarray) -> None:
        """One kernel call of every rank; see `a2d_mpi.planning.machine.KernelModel.seconds`."""
        self.spend("compute", self._kernel_seconds(area, nq, nk, cut))
        self.spend("other", self.step)

    def compute_pair(self, q: np.ndarray, k: np.ndarray, share: float = 1.0) -> None:
        """One kernel call of every rank: the queries of a cell and the keys of a cell.

        `share`: of the work on these, if only that is to be done.
        """
        self.spend("compute", share * self.pair[q, k])
        self.spend("other", self.step)

    def copying(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds to copy, or to add, that many bytes."""
        return nbytes / self.machine.copy / self.share

    def _kernel_seconds(self, *sizes: np.ndarray) -> np.ndarray:
        return self.kernel.seconds(*sizes, self.heads, self.backward) / self.share

    def merge_outs(self, share: float = 1.0) -> None:
        """Merge a partial out into my own, or into some of it."""
        seconds = self.n * self.layer.dq / self.machine.merge / self.share
        self.spend("merge", share * seconds)

    def share_links(self, flows: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Set `rate` for flows (peer, bytes), each (P,), that use the links side by side."""
        m, (inside, link) = self.machine, self.links
        crossing = sum((b * (self.node[peer] != self.node) for peer, b in flows), 0 * self.now)
        of_node = np.bincount(self.node, crossing)[self.node]
        fair = np.where(crossing > 0, crossing / np.maximum(of_node, 1e-300), 1.0)
        alone = link.bandwidth * max(1.0, link.nics / m.ranks_per_node)
        self.rate[0] = inside.bandwidth
        self.rate[1] = np.minimum(alone, link.bandwidth * link.nics * fair)
        self.free[:] = 0

    def gather(self, groups: Sequence[tuple[list[np.ndarray], int, int]]) -> list[list[Hop]]:
        """Post messages together: groups of (peers, bytes a token, tensors a peer).

        The peers send me their tokens and get mine.  Returns the arrivals by group and peer.
        """
        far = [[self.node[peer] != self.node for peer in peers] for peers, *_ in groups]
        sizes = [[self.counts_of(x) * each for x in peers] for peers, each, _ in groups]
        done = np.zeros((2, len(groups), len(self.n)))
        for kind, link in enumerate(self.links):
            count = [sum((x == kind for x in among), 0 * self.n) for among in far]
            total = [
                sum(((x == kind) * size for x, size in zip(*both)), 0 * self.n)
                for both in zip(far, sizes)
            ]
            posted = sum(c * tensors for c, (*_, tensors) in zip(count, groups))
            self.spend("other", 2 * posted * link.overhead)
            self.free[kind] = sum(total) / self.rate[kind]
            for g in range(len(groups)):
                # The messages of a group are alike.  Those of the other take their part of the
                # link until they are done, or until these are.
                size = total[g] / np.maximum(count[g], 1)
                shared = sum(np.minimum(t, c * size) for t, c in zip(total, count))
                done[kind, g] = shared / self.rate[kind] + link.latency
        done += self.now
        self.free += self.now
        need = self.unhidden[:, None] / self.rate
        return [
            [
                (np.where(x, done[1, g], done[0, g]), size * np.where(x, need[1], need[0]))
                for x, size in zip(far[g], sizes[g])
            ]
            for g in range(len(groups))
        ]

    def counts_of(self, peer: np.ndarray) -> np.ndarray:
        """Tokens that a peer in my layer sends."""
        return self.n[peer]

    def route(self, to: np.ndarray) -> Route:
        """The links from every rank to a peer of it."""
        far = (self.node[to] != self.node).astype(int)
        if far.min() == far.max():
            kind = int(far[0])
            return Route(to, kind, (kind, slice(None)))
        return Route(to, far, (far, np.arange(len(far))))

    def send(
        self, route: Route, nbytes: np.ndarray, tensors: int, posted: np.ndarray | None = None
    ) -> Hop:
        """Queue a message of every rank; when it arrives, by its *sender*."""
        kind, mine = route.kind, route.mine
        self.spend("other", 2 * tensors * self.overhead[kind])
        seconds = nbytes / self.rate[mine]
        done = np.maximum(self.now if posted is None else posted, self.free[mine]) + seconds
        self.free[mine] = done
        return done + self.latency[kind], self.unhidden[kind] * seconds

    def hop(self, ring: tuple[Route, np.ndarray], nbytes: np.ndarray, turn: bool = True) -> Hop:
        """All pass k and v, or their gradients, along a ring; by receiver.

        `ring`: the links to the next ones, and the ranks that are the ones before.

        The arrival is when mine has left, too.  `turn`: the next step waits for this hop.
        """
        route, came_from = ring
        done, due = self.send(route, nbytes, 2, np.maximum(self.now, self.now[route.to]))
        found = np.maximum(done, done[came_from]), due[came_from]
        self.spend("other", self.turn * turn)
        if not self.overlap:
            self.wait(found)
            return found[0], 0 * found[1]
        return found

    def exchange(self, per_token: int, to_layers: bool) -> None:
        """Share out the heads in each cell, or bring the results back."""
        heads = self.layout.heads
        if heads == 1:
            return
        self.spend("other", self.copying(2 * self.own * per_token * heads))  # pack and unpack
        # Nobody has all before the last of the cell has posted its messages.
        late = np.repeat(self.now.reshape(-1, heads).max(axis=1), heads) - self.now
        peers = [self.cell * heads + (self.u + k) % heads for k in range(1, heads)]
        self.share_links([(peer, self.own * per_token) for peer in peers])
        self.counts_of = (lambda peer: self.own[peer]) if to_layers else (lambda peer: self.own)
        (hops,) = self.gather([(peers, per_token, 1)])
        del self.counts_of
        done = np.max([done for done, _ in hops], axis=0) + late
        self.wait((done, sum(due for _, due in hops)))


class Partials:
    """Partial results that every rank sends to their owners, each when it is finished.

    Parameters
    ----------
    schedule : Schedule
    peers : list of (P,) int
        The owners, nearest following first.
    per_token, tensors : int
        Bytes of a token, number of tensors.
    """

    def __init__(self, schedule: Schedule, peers: list, per_token: int, tensors: int) -> None:
        self.schedule, self.peers = schedule, peers
        self.per_token, self.tensors = per_token, tensors
        self.hops: list[list[Hop]] = [[] for _ in peers]

    def send(self, k: int, share: float = 1.0) -> None:
        """The one for the k-th peer is finished, or a share of it: units go in turn."""
        if self.schedule.overlap:
            self._send(k, share)

    def collect(self, merge: Callable[[], None]) -> None:
        """Merge those of the peers into mine; then all of mine have left."""
        size = len(self.peers)
        if not self.schedule.overlap:
            for k in range(size):
                self._send(k)
        for k, peer in enumerate(self.peers):
            for done, due in self.hops[size - 1 - k]:  # with that offset the peer sends to me
                self.schedule.wait((done[peer], due[peer]))
            merge()
        for units in self.hops:
            for done, _ in units:
                self.schedule.wait((done, 0 * done))

    def _send(self, k: int, share: float = 1.0) -> None:
        peer = self.peers[k]
        nbytes = share * self.schedule.n[peer] * self.per_token
        self.hops[k].append(self.schedule.send(self.schedule.route(peer), nbytes, self.tensors))
