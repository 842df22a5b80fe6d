"""The runs of a mask as launches of cuDNN or of the plain kernel, made once for a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from a2d_mpi.core.masks import Interval
from a2d_mpi.core.shapes import Run, runs
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Remembered
from a2d_mpi.kernels.cudnn_blocks import Block, supported
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Launch, NotSupported

SHORTEST = 64  # queries of a run: a general run does several shorter ones in one launch
ALIGN = 64  # numbers of 4 bytes: cuDNN wants addresses of whole 16 bytes
KEYS = 512  # a general run has a multiple of so many keys: fewer graphs, each built in seconds


@dataclass(frozen=True, eq=False)
class Piece:
    """A run, ready to be launched.

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
        Where the lse of its queries begins, in the backward pass: bytes from that of the block.
    """

    rows: slice
    keys: slice
    launch: Launch | None
    intervals: tuple[Interval, ...]
    ends: Array | None = None
    holes: Array | None = None
    unseen: Array | None = None
    stats: int = 0


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
    """

    pieces: list[Piece]
    single: bool
    places: Array | None = None
    stats: int = 0


class Pieces:
    """The runs of blocks, remembered by the intervals of their masks.

    Parameters
    ----------
    plain, graphs, gradients, deterministic
        As for `a2d_mpi.kernels.cudnn.CudnnKernel`.
    """

    def __init__(
        self, plain: CupyKernel, graphs: Any, gradients: str, deterministic: bool
    ) -> None:
        self.graphs = graphs
        self._plain, self._gradients, self._deterministic = plain, gradients, deterministic
        self._made = Remembered()

    def get(
        self, intervals: tuple[Interval, ...], q: Array, k: Array, nheads_kv: int, backward: bool
    ) -> Runs:
        """Runs of a mask."""

        def make() -> Runs:
            seen = [x for x in intervals if (x[1] > x[0]).any()] or intervals[:1]
            found = [run for x in seen for run in runs(x, SHORTEST)]
            if len(seen) > 1:
                found = [run for run in found if run.shape != "empty"]
            hidden = _hidden(seen, len(k))
            pieces = [self._piece(run, q, hidden, nheads_kv, backward) for run in found]
            if not any(piece.launch for piece in pieces):  # the plain kernel takes them at once
                rows, keys = slice(0, len(q)), slice(0, len(k))
                if all(run.shape == "empty" for run in found):
                    return Runs([Piece(rows, slice(0, 0), None, ())] * bool(found), True)
                return Runs([Piece(rows, keys, None, intervals)], True)
            single = len(seen) == 1
            if not backward:
                return Runs(pieces, single)
            return Runs(*self._with_stats(pieces, single, q.shape[1]))

        return self._made.get(intervals, make, *q.shape[1:], len(k), nheads_kv, backward)

    def _piece(
        self, run: Run, q: Array, hidden: np.ndarray, nheads_kv: int, backward: bool
    ) -> Piece:
        keys = run.keys
        if run.shape == "empty":
            return Piece(run.rows, keys, None, ())
        if run.shape == "general":
            keys = slice(keys.start // KEYS * KEYS, min(-(-keys.stop // KEYS) * KEYS, len(hidden)))
        block = Block(
            dtype=self._plain.dtype.name,
            nheads=q.shape[1],
            nheads_kv=nheads_kv,
            headdim=q.shape[2],
            nq=run.rows.stop - run.rows.start,
            nk=keys.stop - keys.start,
            shape=run.shape,
            window=run.window,
            scale=self._plain.softmax_scale,
        )
        ends = np.clip(np.stack([run.begin, run.end]) - keys.start, 0, block.nk)
        launch, there = self._launch_of(block, backward), []
        if launch and run.shape == "general":
            upload = self._plain.device.upload
            places = [np.flatnonzero(x) for x in (ends[1] <= ends[0], hidden[keys])]
            aligned = np.zeros((2, -(-block.nq // ALIGN) * ALIGN), np.int32)
            aligned[:, : block.nq] = ends
            there = [
                upload(aligned),
                *(upload(x) if len(x) else None for x in places),
            ]
        return Piece(run.rows, keys, launch, ((ends[0], ends[1]),), *there)

    def _with_stats(
        self, pieces: list[Piece], single: bool, nheads: int
    ) -> tuple[list[Piece], bool, Array, int]:
        """Arguments of `Runs`: the lse of every launch, heads first, is behind the others'."""
        device, found, there, first = self._plain.device, [], [], 0
        for piece in pieces:
            if piece.launch is not None:
                source = np.arange(piece.rows.start, piece.rows.stop)
                n = len(source)
                found.append([source, first + np.arange(n), np.full(n, n)])
                if piece.holes is not None:
                    source[device.download(piece.holes)] = -1
                piece = replace(piece, stats=4 * first)
                first += -(-n * nheads // ALIGN) * ALIGN
            there.append(piece)
        places = device.upload(np.concatenate(found, axis=1, dtype=np.int64))
        return there, single, places, first

    def _launch_of(self, block: Block, backward: bool) -> Launch | None:
        """The launch of cuDNN for a run; None for a run that cuDNN does not take."""
        capability = self._plain.device.capability
        if supported(block, capability, backward, self._gradients, self._deterministic):
            return None
        try:
            return self.graphs.get(block, backward, self._gradients)
        except NotSupported:
            return None


def _hidden(intervals: Iterable[Interval], nk: int) -> np.ndarray:
    """Tell of each key whether no query sees it: (nk,) bool."""
    steps = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        seen = end > begin
        np.add.at(steps, begin[seen], 1)
        np.add.at(steps, end[seen], -1)
    return np.cumsum(steps[:-1]) == 0
