"""Prepare the calls of cuDNN or of the plain kernel that compute the runs of a block."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.blocks import masked
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Block, Launch, NotSupported, reads_past, supported
from a2d_mpi.kernels.shapes import Run, launch_size, runs
from a2d_mpi.masks.intervals import Interval, Intervals

SHORTEST = 64  # shorter runs are joined to general runs, which need fewer launches
ALIGN = 64  # numbers of 4 bytes; cuDNN needs addresses that are multiples of 16 bytes
KEYS = 512  # general runs get a multiple of KEYS keys, for fewer graphs; each takes seconds


@dataclass(eq=False)
class RunCall:
    """A call of cuDNN or of the plain kernel, which computes a run.

    Attributes
    ----------
    rows, keys : slice
        Queries and keys.
    launch : Launch or None
        None: the plain kernel computes the run.
    intervals : tuple of (begin, end)
        Visible keys, as places among `keys`; () if no query sees a key.
    numbers : (2, n) int32 or None
        What the launch takes besides tensors, on the device: for a general block, begin and end of
        its queries; for a padded block, the numbers of queries and keys.  n is a multiple of
        `ALIGN`.
    masked : two of (n,) int64 or None
        Indices of the run's queries that see no key, and of the run's keys that no query of the
        block sees.  None if there are no such queries or keys.
    stats : int
        Offset in bytes of the lse of the queries in the backward pass.
    in_place : (bool, bool)
        Whether the launch reads queries and keys where they are: all of its rows are there, and
        none is masked.
    """

    rows: slice
    keys: slice
    launch: Launch | None
    intervals: tuple[Interval, ...]
    numbers: Array | None = None
    masked: tuple[Array | None, Array | None] = (None, None)
    stats: int = 0
    in_place: tuple[bool, bool] = (True, True)


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
    """

    calls: list[RunCall]
    single: bool
    places: Array | None = None
    stats: int = 0

    @property
    def falls_back(self) -> bool:
        """True if the plain kernel computes any of the runs."""
        return any(call.launch is None and call.intervals for call in self.calls)


class CallMaker:
    """Makes the calls for blocks; the intervals of a block keep its calls.

    Parameters
    ----------
    plain, graphs
        As in `a2d_mpi.kernels.cudnn.CudnnKernel`.
    """

    def __init__(self, plain: CupyKernel, graphs: Any) -> None:
        self.graphs, self._plain = graphs, plain

    def get(
        self, intervals: Intervals, q: Array, v: Array, nheads_kv: int, backward: bool
    ) -> BlockRuns:
        """Return the calls that compute the runs of a block.

        Parameters
        ----------
        intervals : Intervals
            Visible keys of each query.
        q : (nq, nheads, headdim)
        v : (nk, nheads_kv, headdim_v)
        nheads_kv : int
            KV heads of the launches, which may be more than the heads of v: heads are repeated.
        backward : bool
        """
        prepared = intervals.prepared
        key = self, *q.shape[1:], len(v), v.shape[2], nheads_kv, backward
        if key not in prepared:
            prepared[key] = self._runs(intervals, q, v, nheads_kv, backward)
        return prepared[key]

    def _runs(
        self, intervals: Intervals, q: Array, v: Array, nheads_kv: int, backward: bool
    ) -> BlockRuns:
        """Cut a block into runs, and find a launch for each."""
        seen = [x for x in intervals if (x[1] > x[0]).any()] or intervals[:1]
        # cuDNN has no mask of its own beside a soft-cap.
        join = self._plain.logit_softcap is not None
        all_runs = [run for x in seen for run in runs(x, SHORTEST, join)]
        if len(seen) > 1:
            all_runs = [run for run in all_runs if run.shape != "empty"]
        hide = masked(seen, len(v))
        sizes = q.shape[1], nheads_kv, q.shape[2], v.shape[2], len(q), len(v)
        dtype, scale = self._plain.dtype.name, self._plain.softmax_scale
        whole = Block(dtype, *sizes, "general", scale, softcap=self._plain.logit_softcap)
        calls = [self._call(run, whole, hide, backward, intervals.varying) for run in all_runs]
        if not any(call.launch for call in calls):  # the plain kernel computes all in one call
            rows, keys = slice(0, len(q)), slice(0, len(v))
            if all(run.shape == "empty" for run in all_runs):
                return BlockRuns([RunCall(rows, slice(0, 0), None, ())] * bool(all_runs), True)
            return BlockRuns([RunCall(rows, keys, None, Intervals(intervals))], True)
        stats = self._place_stats(calls) if backward else (None, 0)
        return BlockRuns(calls, len(seen) == 1, *stats)

    def _call(
        self,
        run: Run,
        whole: Block,
        hide: tuple[np.ndarray, np.ndarray],
        backward: bool,
        varying: bool,
    ) -> RunCall:
        """Return the call of a run; `hide`: whether each query and key of the block is."""
        rows, keys, shape = run.rows, run.keys, run.shape
        if shape == "empty":
            return RunCall(rows, keys, None, ())
        capability = self._plain.device.capability
        past = backward and not varying and reads_past(shape, run.size[1], capability)
        if past or (varying and whole.softcap is not None):
            shape = "general"  # whose intervals hide keys beyond the last one
        if shape == "general" and not varying:
            keys = slice(keys.start // KEYS * KEYS, min(-(-keys.stop // KEYS) * KEYS, whole.nk))
        run = replace(run, shape=shape, keys=keys)
        size = launch_size(run) if varying else run.size
        ends = np.clip(np.stack([run.begin, run.end]) - keys.start, 0, run.size[1])
        padded = varying and shape != "general"
        block = replace(
            whole, nq=size[0], nk=size[1], shape=shape, window=run.window, padded=padded
        )
        launch, visible = self._launch_of(block, backward), Intervals([(ends[0], ends[1])])
        if launch is None:
            return RunCall(rows, keys, None, visible)
        numbers, places = None, (None, None)
        if shape == "general":
            numbers = np.zeros((2, -(-block.nq // ALIGN) * ALIGN), np.int32)
            numbers[:, : run.size[0]] = ends
            places = self._places(ends[1] <= ends[0]), self._places(hide[1][keys])
        elif padded:
            numbers = np.zeros((2, ALIGN), np.int32)
            numbers[:, 0] = run.size
        in_place = tuple(
            where.start + n <= len(x) and not x[where.start : where.start + n].any() and at is None
            for where, n, x, at in zip((rows, keys), size, hide, places)
        )
        if numbers is not None:
            numbers = self._plain.device.upload(numbers)
        return RunCall(rows, keys, launch, visible, numbers, places, in_place=in_place)

    def _places(self, x: np.ndarray) -> Array | None:
        """Return the indices of true elements, on the device; None if there are none."""
        return self._plain.device.upload(np.flatnonzero(x)) if x.any() else None

    def _place_stats(self, calls: list[RunCall]) -> tuple[Array, int]:
        """Set the place of every launch's lse: one launch after the other, heads first.

        Return `places` and `stats` of `BlockRuns`.
        """
        by_launch: list[list[np.ndarray]] = []
        first = 0
        for call in calls:
            if call.launch is not None:
                n = call.launch.block.nq
                source = np.full(n, -1)
                source[: call.rows.stop - call.rows.start] = np.r_[call.rows]
                if call.masked[0] is not None:
                    source[self._plain.device.download(call.masked[0])] = -1
                by_launch.append([source, first + np.arange(n), np.full(n, n)])
                call.stats = 4 * first
                first += -(-n * call.launch.block.nheads // ALIGN) * ALIGN
        places = np.concatenate(by_launch, axis=1, dtype=np.int64)
        return self._plain.device.upload(places), first

    def _launch_of(self, block: Block, backward: bool) -> Launch | None:
        """Return the launch of cuDNN for a block; None if cuDNN does not compute it."""
        capability = self._plain.device.capability
        with suppress(NotSupported):
            if not supported(block, capability, backward):
                return self.graphs.get(block, backward)
        return None
