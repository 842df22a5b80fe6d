"""The runs of a mask as launches of cuDNN or of the plain kernel, made once for a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.cudnn_blocks import Block, reads_past, supported
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Launch, NotSupported
from a2d_mpi.kernels.ragged import batches, is_ragged, room, sequences, size_classes
from a2d_mpi.kernels.shapes import Run, runs
from a2d_mpi.masks.intervals import Interval, Intervals, queries_per_key

SHORTEST = 64  # queries of a run: a general run does several shorter ones in one launch
ALIGN = 64  # numbers of 4 bytes: cuDNN wants addresses of whole 16 bytes
SCORES = 1 << 31  # of a launch, at most, where cuDNN keeps them: 4 GiB
KEYS = 512  # a general run has a multiple of so many keys: fewer graphs, each built in seconds


@dataclass(frozen=True, eq=False)
class Piece:
    """A run, or a batch of runs, ready to be launched.

    Attributes
    ----------
    rows, keys : slice
    launch : Launch or None
        None: the plain kernel computes the run.
    intervals : tuple of (begin, end)
        Visible keys, as positions among `keys`; () if nobody sees a key.
    ends : (2, n) int32 or None
        The same on the device, of a general run of cuDNN; n: queries, and what aligns the ends.
    holes, unseen : (n,) int64 or None
        Those of its queries that see nothing, and those of its keys that no query of the block
        sees, if there are any.
    stats : int
        Where the lse of its queries begins, in the backward pass, in bytes; of a batch, where that
        of the block's queries does.
    sequences : (5, n) int64 or None
        Of a batch, as of `a2d_mpi.kernels.ragged.sequences`, on the device; `rows` and `keys` then
        reach from the first run to the last.
    gaps : bool
        Of a batch: whether some of these keys are of none of its runs.
    """

    rows: slice
    keys: slice
    launch: Launch | None
    intervals: tuple[Interval, ...]
    ends: Array | None = None
    holes: Array | None = None
    unseen: Array | None = None
    stats: int = 0
    sequences: Array | None = None
    gaps: bool = False


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a block.

    Attributes
    ----------
    pieces : list of Piece
    single : bool
        Whether each query is in one of them alone.
    places : (3, n) int64 or None
        For the backward pass, of the n queries of all launches of cuDNN, one launch after the
        other, as `Cuda.out_and_stats` takes them.
    stats : int
        Float32 that it fills, gaps included.
    holes, unseen : (n,) int64 or None
        Where there are batches: queries of the block that see nothing, and keys that no query of
        it sees, if there are any.
    """

    pieces: list[Piece]
    single: bool
    places: Array | None = None
    stats: int = 0
    holes: Array | None = None
    unseen: Array | None = None


class Pieces:
    """The runs of blocks, made once for the intervals of a block.

    Parameters
    ----------
    plain, graphs, deterministic
        As for `a2d_mpi.kernels.cudnn.CudnnKernel`.
    """

    def __init__(self, plain: CupyKernel, graphs: Any, deterministic: bool) -> None:
        self.graphs = graphs
        self._plain, self._deterministic = plain, deterministic

    def get(
        self, intervals: tuple[Interval, ...], q: Array, k: Array, nheads_kv: int, backward: bool
    ) -> Runs:
        """Runs of a mask."""
        prepared = Intervals.of(intervals).prepared
        key = self, *q.shape[1:], len(k), nheads_kv, backward
        if key not in prepared:
            prepared[key] = self._runs(intervals, q, k, nheads_kv, backward)
        return prepared[key]

    def _runs(
        self, intervals: tuple[Interval, ...], q: Array, k: Array, nheads_kv: int, backward: bool
    ) -> Runs:
        """Cut a block into runs, and find a launch for each."""
        seen = [x for x in intervals if (x[1] > x[0]).any()] or intervals[:1]
        # Deterministic gradients keep the scores of a launch, in 16 bits.
        most = SCORES // q.shape[1] if backward and self._deterministic else None
        found = [run for x in seen for run in runs(x, SHORTEST, most)]
        if len(seen) > 1:
            found = [run for run in found if run.shape != "empty"]
        hidden, single = queries_per_key(seen, len(k)) == 0, len(seen) == 1
        given = q, hidden, nheads_kv, backward
        if single:
            pieces = [x for batch in batches(found) for x in self._batch(batch, *given)]
        else:
            pieces = [self._piece(run, *given) for run in found]
        if not any(piece.launch for piece in pieces):  # the plain kernel takes them at once
            rows, keys = slice(0, len(q)), slice(0, len(k))
            if all(run.shape == "empty" for run in found):
                return Runs([Piece(rows, slice(0, 0), None, ())] * bool(found), True)
            return Runs([Piece(rows, keys, None, Intervals(intervals))], True)
        holes = np.flatnonzero(seen[0][1] <= seen[0][0])  # of the one, where there are batches
        made = Runs(pieces, single)
        if backward:
            made = self._with_stats(made, q, holes)
        if any(piece.sequences is not None for piece in pieces):
            places = [self._upload(x) for x in (holes, np.flatnonzero(hidden))]
            made = replace(made, holes=places[0], unseen=places[1])
        return made

    def _batch(
        self, batch: list[Run], q: Array, hidden: np.ndarray, nheads_kv: int, backward: bool
    ) -> list[Piece]:
        """One piece, if cuDNN takes the runs at once; else one for each."""
        if is_ragged(batch) or self._reads_past(batch[0], backward):
            first, last = batch[0], batch[-1]
            block = self._block(q, nheads_kv, first, *size_classes(batch))
            block = replace(block, batch=len(batch), total=room(len(q)) if backward else 0)
            if launch := self._launch_of(block, backward):
                nheads, headdim = q.shape[1:]
                given = sequences(batch, (nheads * headdim, nheads_kv * headdim, nheads), ALIGN)
                rows = slice(first.rows.start, last.rows.stop)
                keys = slice(first.keys.start, last.keys.stop)
                gaps = sum(run.size[1] for run in batch) < keys.stop - keys.start
                return [Piece(rows, keys, launch, (), sequences=self._upload(given), gaps=gaps)]
        return [self._piece(run, q, hidden, nheads_kv, backward) for run in batch]

    def _block(self, q: Array, nheads_kv: int, run: Run, nq: int, nk: int) -> Block:
        return Block(
            dtype=self._plain.dtype.name,
            nheads=q.shape[1],
            nheads_kv=nheads_kv,
            headdim=q.shape[2],
            nq=nq,
            nk=nk,
            shape=run.shape,
            window=run.window,
            scale=self._plain.softmax_scale,
        )

    def _piece(
        self, run: Run, q: Array, hidden: np.ndarray, nheads_kv: int, backward: bool
    ) -> Piece:
        keys = run.keys
        if run.shape == "empty":
            return Piece(run.rows, keys, None, ())
        if self._reads_past(run, backward):
            run = replace(run, shape="general")  # which hides what is beyond the last key
        if run.shape == "general":
            keys = slice(keys.start // KEYS * KEYS, min(-(-keys.stop // KEYS) * KEYS, len(hidden)))
        nq, nk = run.size[0], keys.stop - keys.start
        ends = np.clip(np.stack([run.begin, run.end]) - keys.start, 0, nk)
        launch, there = self._launch_of(self._block(q, nheads_kv, run, nq, nk), backward), []
        if launch and run.shape == "general":
            places = [np.flatnonzero(x) for x in (ends[1] <= ends[0], hidden[keys])]
            aligned = np.zeros((2, -(-nq // ALIGN) * ALIGN), np.int32)
            aligned[:, :nq] = ends
            there = [self._upload(x) for x in (aligned, *places)]
        return Piece(run.rows, keys, launch, Intervals([(ends[0], ends[1])]), *there)

    def _reads_past(self, run: Run, backward: bool) -> bool:
        return backward and reads_past(run.shape, run.size[1], self._plain.device.capability)

    def _upload(self, x: np.ndarray) -> Array | None:
        """The array on the device; None for an empty one."""
        return self._plain.device.upload(x) if x.size else None

    def _with_stats(self, made: Runs, q: Array, holes: np.ndarray) -> Runs:
        """Tell where the lse of every launch goes: behind the others', heads first.

        Before them is that of all queries, tokens first, for the batches: they may read on past
        the end of a sequence.
        """
        device, nheads = self._plain.device, q.shape[1]
        found: list[list[np.ndarray]] = []
        pieces, first = [], 0
        if any(piece.sequences is not None for piece in made.pieces):
            source, n = np.arange(len(q)), len(q)
            source[holes] = -1
            found.append([source, np.arange(n) * nheads, np.full(n, 1)])
            first = -(-n * nheads // ALIGN) * ALIGN
        for piece in made.pieces:
            if piece.launch is not None and piece.sequences is None:
                source = np.arange(piece.rows.start, piece.rows.stop)
                n = len(source)
                found.append([source, first + np.arange(n), np.full(n, n)])
                if piece.holes is not None:
                    source[device.download(piece.holes)] = -1
                piece = replace(piece, stats=4 * first)
                first += -(-n * nheads // ALIGN) * ALIGN
            pieces.append(piece)
        places = device.upload(np.concatenate(found, axis=1, dtype=np.int64))
        return Runs(pieces, made.single, places, first)

    def _launch_of(self, block: Block, backward: bool) -> Launch | None:
        """The launch of cuDNN for a run; None for a run that cuDNN does not take."""
        capability = self._plain.device.capability
        if supported(block, capability, backward, self._deterministic):
            return None
        try:
            return self.graphs.get(block, backward)
        except NotSupported:
            return None
