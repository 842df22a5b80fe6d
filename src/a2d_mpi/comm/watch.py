"""A line on stderr when ranks wait too long for each other, and the end of the job if asked for.

Two environment variables, the same on all ranks, are read when a grid is made:

A2D_MPI_STALL_SECONDS
    Seconds, 300 by default, after which waiting ranks report the place and the ranks that are
    missing.  0: never, for debuggers.
A2D_MPI_STALL_ABORT
    1: the job is then aborted, with exit code 75 if the launcher passes it on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

SECONDS = 300.0
_TAG = 20
_ABORTED = 75  # exit code: "temporary failure" of sysexits.h


class Watch:
    """The wait of this rank, with its start; a thread of the process looks at it now and then.

    Parameters
    ----------
    comm : Intracomm
        Of the ranks that wait for each other.
    doing : object
        The call that is under way; its text is shown.  The caller keeps it up to date.
    talks : bool
        True: ranks tell each other on `comm`, and all point-to-point messages of `comm` are the
        watch's.  False: each rank speaks for itself.

    Raises
    ------
    ValueError
        If an environment variable cannot be read.
    """

    def __init__(self, comm: MPI.Intracomm, doing: object = "", talks: bool = True) -> None:
        self.doing = doing
        self.calls = 0  # begun by all ranks together: tells old messages from new ones
        self._comm = comm
        self._talks = talks and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._patience, self._aborts = _settings()
        self._lock = threading.Lock()
        self._waiting: tuple[float, str] | None = None
        self._noticed: tuple[float, str] | None = None
        self._heard: dict[int, tuple[float, str]] = {}
        self._speaks = 0.0
        self._sent: list[MPI.Request] = []
        if self._patience and comm.size > 1:
            _Watchman.employ(self, self._patience)

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Enclose a wait for other ranks, which may never end if one of them fails."""
        self._waiting = time.monotonic(), place
        try:
            yield
        finally:
            with self._lock:  # the other thread calls MPI only as long as this one waits
                self._waiting = None

    def look(self) -> None:
        """Notice that this rank or another one has waited for long; for another thread."""
        with self._lock:
            if self._waiting is not None:
                self._look(self._waiting)

    def _look(self, waiting: tuple[float, str]) -> None:
        now, comm = time.monotonic(), self._comm
        heard = self._listen()
        if waiting is not self._noticed:
            if not heard and now - waiting[0] < self._patience:
                return
            text = f"{self.doing}, {waiting[1]}"
            self._noticed, self._heard = waiting, {comm.rank: (waiting[0], text)}
            # Until then all waiting ranks have looked, too.
            self._speaks = now + max(1.0, 2 * period(self._patience))
            for rank in range(comm.size) if self._talks else ():
                if rank != comm.rank:
                    self._sent.append(comm.isend((self.calls, now - waiting[0], text), rank, _TAG))
        self._heard |= heard
        if self._speaks and now > self._speaks:
            self._speaks = 0.0
            if min(self._heard) == comm.rank:
                self._tell()

    def _listen(self) -> dict[int, tuple[float, str]]:
        """Start and place of the waits that other ranks report of the call under way."""
        heard, status = {}, MPI.Status()
        while self._talks and self._comm.iprobe(MPI.ANY_SOURCE, _TAG):
            calls, seconds, text = self._comm.recv(None, MPI.ANY_SOURCE, _TAG, status)
            if calls == self.calls:
                heard[status.source] = time.monotonic() - seconds, text
        return heard

    def _tell(self) -> None:
        places: dict[str, list[int]] = {}
        for rank, (_, text) in sorted(self._heard.items()):
            places.setdefault(text, []).append(rank)
        line = "; ".join(f"{name_ranks(ranks)} in {text}" for text, ranks in places.items())
        ranks = range(self._comm.size)
        if self._talks:
            absent = [rank for rank in ranks if rank not in self._heard]
            line += f"; of {len(ranks)} ranks, "
            line += f"{name_ranks(absent)} did not come" if absent else "all wait for each other"
        else:
            line += f" ({len(ranks)} ranks)"
        if self._aborts:
            line += "; aborting the job (A2D_MPI_STALL_ABORT)"
        seconds = time.monotonic() - min(since for since, _ in self._heard.values())
        line = f"a2d_mpi: waiting for {seconds:.0f} s: {line}\n"
        print(line, end="", file=sys.stderr, flush=True)  # at once: other ranks print, too
        if self._aborts:
            if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                self._comm.Abort(_ABORTED)
            os._exit(_ABORTED)  # the launcher ends the others


class _Watchman(threading.Thread):
    """The one thread that looks at all watches of the process."""

    _lock = threading.Lock()
    _only: _Watchman | None = None

    def __init__(self) -> None:
        super().__init__(name="a2d_mpi watch", daemon=True)
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.period = period(SECONDS)

    @classmethod
    def employ(cls, watch: Watch, patience: float) -> None:
        with cls._lock:
            if cls._only is None or not cls._only.is_alive():
                cls._only = cls()
                cls._only.start()
            cls._only.watches.add(watch)
            cls._only.period = min(cls._only.period, period(patience))

    def run(self) -> None:
        while True:
            # In short naps: a later watch may be less patient.
            time.sleep(min(self.period, 1.0))
            for watch in list(self.watches):
                watch.look()


def period(patience: float) -> float:
    """Seconds between two looks of the watchman."""
    return min(max(patience / 8, 0.05), 10.0)


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a few words: "rank 3", "ranks 0, 2 and 5", "ranks 0, 1, 2, 3, ... (64 of them)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, ... ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _settings() -> tuple[float, bool]:
    text = os.environ.get("A2D_MPI_STALL_SECONDS", "") or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"A2D_MPI_STALL_SECONDS must be seconds, 0 for never, got {text!r}")
    aborts = os.environ.get("A2D_MPI_STALL_ABORT", "") or "0"
    if aborts not in ("0", "1"):
        raise ValueError(f"A2D_MPI_STALL_ABORT must be 0 or 1, got {aborts!r}")
    return seconds, aborts == "1"
