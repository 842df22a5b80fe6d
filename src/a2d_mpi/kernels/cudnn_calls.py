"""Prepare the calls of cuDNN or of the plain kernel that compute the runs of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Block, Launch, NotSupported, reads_past, supported
from a2d_mpi.kernels.ragged import batches, is_ragged, room, sequences, size_classes
from a2d_mpi.kernels.shapes import Run, runs
from a2d_mpi.masks.intervals import Interval, Intervals, queries_per_key

SHORTEST = 64  # shorter runs are joined to general runs, which need fewer launches
ALIGN = 64  # numbers of 4 bytes; cuDNN needs addresses that are multiples of 16 bytes
SCORES = 1 << 31  # most scores of a launch, if cuDNN keeps them: 4 GiB
KEYS = 512  # general runs get a multiple of KEYS keys, for fewer graphs; each takes seconds


@dataclass(eq=False)
class RunCall:
    """A call of cuDNN or of the plain kernel, which computes a run or a batch of runs.

    Attributes
    ----------
    rows, keys : slice
        Queries and keys; for a batch, from its first run to its last.
    launch : Launch or None
        None: the plain kernel computes the run.
    intervals : tuple of (begin, end)
        Visible keys, as places among `keys`; () if no query sees a key.
    numbers : (2, n) int32 or (7, n) int64 or None
        What the launch takes besides tensors, on the device.  For a general run, `intervals`; n is
        the number of queries, rounded up for alignment.  For a batch,
        `a2d_mpi.kernels.ragged.sequences`.
    masked_rows, masked_keys : (n,) int64 or None
        Indices of the run's queries that see no key, and of the run's keys that no query of the
        block sees.  None if there are no such queries or keys.
    stats : int
        Offset in bytes of the lse of the queries in the backward pass.  For a batch, the offset of
        the lse of all queries of the block.
    gaps : bool
        For a batch: whether some of `keys` belong to none of its runs.
    """

    rows: slice
    keys: slice
    launch: Launch | None
    intervals: tuple[Interval, ...]
    numbers: Array | None = None
    masked_rows: Array | None = None
    masked_keys: Array | None = None
    stats: int = 0
    gaps: bool = False

    @property
    def batch(self) -> bool:
        """True if one launch computes a batch of runs."""
        return self.launch is not None and self.launch.block.batch > 0


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """The calls that compute the runs of a block.

    Attributes
    ----------
    calls : list of RunCall
    single : bool
        Whether each query is in only one call.
    places : (3, n) int64 or None
        Argument of `Cuda.out_and_stats` for the backward pass: the n queries of all launches of
        cuDNN, one launch after the other.
    stats : int
        Number of float32 that `Cuda.out_and_stats` fills, with gaps.
    masked_rows, masked_keys : (n,) int64 or None
        If there are batches: queries of the block that see no key, and keys that no query of the
        block sees.  None: there are none.
    """

    calls: list[RunCall]
    single: bool
    places: Array | None = None
    stats: int = 0
    masked_rows: Array | None = None
    masked_keys: Array | None = None

    @property
    def falls_back(self) -> bool:
        """True if the plain kernel computes any of the runs."""
        return any(call.launch is None and call.intervals for call in self.calls)


class CallMaker:
    """Makes the calls for blocks; the intervals of a block keep its calls.

    Parameters
    ----------
    plain, graphs, deterministic
        As in `a2d_mpi.kernels.cudnn.CudnnKernel`.
    """

    def __init__(self, plain: CupyKernel, graphs: Any, deterministic: bool) -> None:
        self.graphs = graphs
        self._plain, self._deterministic = plain, deterministic

    def get(
        self, intervals: tuple[Interval, ...], q: Array, v: Array, nheads_kv: int, backward: bool
    ) -> BlockRuns:
        """Return the calls that compute the runs of a block.

        Parameters
        ----------
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query.
        q : (nq, nheads, headdim)
        v : (nk, nheads_kv, headdim_v)
        nheads_kv : int
            KV heads of the launches, which may be more than the heads of v: heads are repeated.
        backward : bool
        """
        prepared = Intervals.of(intervals).prepared
        key = self, *q.shape[1:], len(v), v.shape[2], nheads_kv, backward
        if key not in prepared:
            prepared[key] = self._runs(intervals, q, v, nheads_kv, backward)
        return prepared[key]

    def _runs(
        self, intervals: tuple[Interval, ...], q: Array, v: Array, nheads_kv: int, backward: bool
    ) -> BlockRuns:
        """Cut a block into runs, and find a launch for each."""
        seen = [x for x in intervals if (x[1] > x[0]).any()] or intervals[:1]
        # Deterministic gradients keep the scores of a launch, in 16 bits.
        most = SCORES // q.shape[1] if backward and self._deterministic else None
        # cuDNN has no mask of its own beside a soft-cap.
        join = self._plain.logit_softcap is not None
        all_runs = [run for x in seen for run in runs(x, SHORTEST, most, join)]
        if len(seen) > 1:
            all_runs = [run for run in all_runs if run.shape != "empty"]
        hidden, single = queries_per_key(seen, len(v)) == 0, len(seen) == 1
        sizes = q.shape[1], nheads_kv, q.shape[2], v.shape[2], len(q), len(v)
        dtype, scale = self._plain.dtype.name, self._plain.softmax_scale
        whole = Block(dtype, *sizes, "general", scale, softcap=self._plain.logit_softcap)
        given = whole, hidden, backward
        if single:
            calls = [x for batch in batches(all_runs) for x in self._batch(batch, *given)]
        else:
            calls = [self._call(run, *given) for run in all_runs]
        if not any(call.launch for call in calls):  # the plain kernel computes all in one call
            rows, keys = slice(0, len(q)), slice(0, len(v))
            if all(run.shape == "empty" for run in all_runs):
                return BlockRuns([RunCall(rows, slice(0, 0), None, ())] * bool(all_runs), True)
            return BlockRuns([RunCall(rows, keys, None, Intervals(intervals))], True)
        # Blocks with batches have one interval.
        masked, masked_rows = [], np.flatnonzero(seen[0][1] <= seen[0][0])
        if any(call.batch for call in calls):
            masked = [self._upload(x) for x in (masked_rows, np.flatnonzero(hidden))]
        stats = self._place_stats(calls, q, masked_rows) if backward else (None, 0)
        return BlockRuns(calls, single, *stats, *masked)

    def _batch(
        self, batch: list[Run], whole: Block, hidden: np.ndarray, backward: bool
    ) -> list[RunCall]:
        """Return one call if one launch of cuDNN can compute the batch, or a call for each run."""
        if is_ragged(batch) or self._reads_past(batch[0], backward):
            first, last = batch[0], batch[-1]
            block = _part(whole, first, *size_classes(batch))
            block = replace(block, batch=len(batch), total=room(whole.nq) if backward else 0)
            if launch := self._launch_of(block, backward):
                given = sequences(batch, block, ALIGN)
                rows = slice(first.rows.start, last.rows.stop)
                keys = slice(first.keys.start, last.keys.stop)
                gaps = sum(run.size[1] for run in batch) < keys.stop - keys.start
                return [RunCall(rows, keys, launch, (), self._upload(given), gaps=gaps)]
        return [self._call(run, whole, hidden, backward) for run in batch]

    def _call(self, run: Run, whole: Block, hidden: np.ndarray, backward: bool) -> RunCall:
        keys = run.keys
        if run.shape == "empty":
            return RunCall(run.rows, keys, None, ())
        if self._reads_past(run, backward):
            run = replace(run, shape="general")  # a general mask hides keys beyond the last one
        if run.shape == "general":
            keys = slice(keys.start // KEYS * KEYS, min(-(-keys.stop // KEYS) * KEYS, len(hidden)))
        nq, nk = run.size[0], keys.stop - keys.start
        ends = np.clip(np.stack([run.begin, run.end]) - keys.start, 0, nk)
        launch, uploaded = self._launch_of(_part(whole, run, nq, nk), backward), []
        if launch and run.shape == "general":
            places = [np.flatnonzero(x) for x in (ends[1] <= ends[0], hidden[keys])]
            aligned = np.zeros((2, -(-nq // ALIGN) * ALIGN), np.int32)
            aligned[:, :nq] = ends
            uploaded = [self._upload(x) for x in (aligned, *places)]
        return RunCall(run.rows, keys, launch, Intervals([(ends[0], ends[1])]), *uploaded)

    def _reads_past(self, run: Run, backward: bool) -> bool:
        return backward and reads_past(run.shape, run.size[1], self._plain.device.capability)

    def _upload(self, x: np.ndarray) -> Array | None:
        """Return the array on the device; None for an empty array."""
        return self._plain.device.upload(x) if x.size else None

    def _place_stats(
        self, calls: list[RunCall], q: Array, masked_rows: np.ndarray
    ) -> tuple[Array, int]:
        """Set the place of every launch's lse: one launch after the other, heads first.

        If there are batches, the lse of all queries comes first, in token-major order: a batch may
        read past the end of a sequence.  Return `places` and `stats` of `BlockRuns`.
        """
        device, nheads = self._plain.device, q.shape[1]
        by_launch: list[list[np.ndarray]] = []
        first = 0
        if any(call.batch for call in calls):
            source, n = np.arange(len(q)), len(q)
            source[masked_rows] = -1
            by_launch.append([source, np.arange(n) * nheads, np.full(n, 1)])
            first = -(-n * nheads // ALIGN) * ALIGN
        for call in calls:
            if call.launch is not None and not call.batch:
                source = np.arange(call.rows.start, call.rows.stop)
                n = len(source)
                by_launch.append([source, first + np.arange(n), np.full(n, n)])
                if call.masked_rows is not None:
                    source[device.download(call.masked_rows)] = -1
                call.stats = 4 * first
                first += -(-n * nheads // ALIGN) * ALIGN
        return device.upload(np.concatenate(by_launch, axis=1, dtype=np.int64)), first

    def _launch_of(self, block: Block, backward: bool) -> Launch | None:
        """Return the launch of cuDNN for a block; None if cuDNN does not compute it."""
        capability = self._plain.device.capability
        if supported(block, capability, backward, self._deterministic):
            return None
        try:
            return self.graphs.get(block, backward)
        except NotSupported:
            return None


def _part(whole: Block, run: Run, nq: int, nk: int) -> Block:
    """Return a run of a block, with `nq` queries and `nk` keys."""
    return replace(whole, nq=nq, nk=nk, shape=run.shape, window=run.window)
