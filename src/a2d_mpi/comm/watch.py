"""Report on stderr if ranks wait too long for each other, and optionally abort the job.

Two environment variables, the same on all ranks, are read when a grid is made:

A2D_MPI_STALL_SECONDS
    Seconds after which waiting ranks report the call and the missing ranks.  Default: 300.  With 0
    ranks never report, for example under a debugger.
A2D_MPI_STALL_ABORT
    With 1 the job is aborted after the report, with exit code 75 if the launcher passes it on.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

from mpi4py import MPI

SECONDS = 300.0
NAP = 0.25  # seconds between two checks of all waits
_PAUSE = 1.0  # seconds until the report: by then all waiting ranks have checked, too
_TAG = 32767  # the largest that MPI guarantees; tags of plans are smaller
_ABORTED = 75  # exit code: "temporary failure" of sysexits.h


class Watch:
    """The present wait of this rank, whose length a thread of the process checks.

    Parameters
    ----------
    comm : Intracomm
        Communicator of the ranks that wait for each other.
    doing : object
        The present call, whose text is reported.  The caller updates it.
    talks : bool
        Whether ranks send their reports to each other on `comm`, and one rank prints them.  Then
        nothing else may send messages with the tag of reports on `comm`.  Otherwise each rank
        prints a report of its own.

    Raises
    ------
    ValueError
        If an environment variable cannot be read.
    """

    def __init__(self, comm: MPI.Intracomm, doing: object = "", talks: bool = True) -> None:
        self.doing = doing
        # Number of calls that all ranks have begun together; it tells reports of calls apart.
        self.calls = 0
        self._comm, self._talks = comm, talks and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._patience, self._aborts = _settings()
        self._lock = threading.Lock()
        self._waiting: tuple[float, str] | None = None
        # Start and text of waits that are too long, by rank, and the time at which to print them.
        self._reported: dict[int, tuple[float, str]] = {}
        self._prints_at = math.inf
        self._sent: list[MPI.Request] = []
        if self._patience and comm.size > 1:
            with _adding:
                _watches().add(self)

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Mark the context as a wait for other ranks; it may never end if one of them fails."""
        self._waiting = time.monotonic(), place
        try:
            yield
        finally:
            with self._lock:  # the checking thread calls MPI only while this thread waits
                self._waiting, self._reported = None, {}

    def look(self) -> None:
        """Check for waits of this rank and others that are too long; another thread calls this."""
        with self._lock:
            if self._waiting is None:
                return
            now, (start, place), comm = time.monotonic(), self._waiting, self._comm
            heard = self._listen()
            if not self._reported and (heard or now - start > self._patience):
                text = f"{self.doing}, {place}"
                self._reported, self._prints_at = {comm.rank: (start, text)}, now + _PAUSE
                report = self.calls, now - start, text
                others = set(range(comm.size)) - {comm.rank} if self._talks else ()
                self._sent += [comm.isend(report, rank, _TAG) for rank in others]
            self._reported |= heard
            if self._reported and now > self._prints_at:
                self._prints_at = math.inf
                if min(self._reported) == comm.rank:
                    self._tell()

    def _listen(self) -> dict[int, tuple[float, str]]:
        """Receive other ranks' reports on the present call: start and text by rank."""
        heard, status = {}, MPI.Status()
        while self._talks and self._comm.iprobe(MPI.ANY_SOURCE, _TAG):
            calls, seconds, text = self._comm.recv(None, MPI.ANY_SOURCE, _TAG, status)
            if calls == self.calls:
                heard[status.source] = time.monotonic() - seconds, text
        return heard

    def _tell(self) -> None:
        places = by_text((rank, text) for rank, (_, text) in sorted(self._reported.items()))
        line = "; ".join(f"{ranks} in {text}" for text, ranks in places.items())
        size = self._comm.size
        absent = [rank for rank in range(size) if rank not in self._reported]
        if not self._talks:
            line += f" ({size} ranks)"
        elif absent:
            line += f"; of {size} ranks, {name_ranks(absent)} did not arrive"
        else:
            line += f"; of {size} ranks, all wait for each other"
        if self._aborts:
            line += "; aborting the job (A2D_MPI_STALL_ABORT)"
        seconds = time.monotonic() - min(start for start, _ in self._reported.values())
        line = f"a2d_mpi: waiting for {seconds:.0f} s: {line}\n"
        print(line, end="", file=sys.stderr, flush=True)  # one write, as other ranks print, too
        if self._aborts:
            if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                self._comm.Abort(_ABORTED)
            os._exit(_ABORTED)  # the launcher ends the other ranks


_adding = threading.Lock()


@cache
def _watches() -> weakref.WeakSet[Watch]:
    """Return the set of all watches of the process; the first call starts a thread for them."""
    watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    def look() -> None:
        while True:
            time.sleep(NAP)
            with _adding:
                present = list(watches)
            for watch in present:
                # A revoked communicator raises here.  The wait itself ends with the same error.
                with suppress(MPI.Exception):
                    watch.look()

    threading.Thread(target=look, name="a2d_mpi watch", daemon=True).start()
    return watches


def name_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks: "rank 3", "ranks 0, 2 and 5", "ranks 0, 1, 2, 3, ... (64 of them)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, ... ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def by_text(texts: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Name the ranks of each text; `texts` are ranks, in ascending order, with their texts."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    return {text: name_ranks(x) for text, x in ranks.items()}


def _settings() -> tuple[float, bool]:
    seconds = os.environ.get("A2D_MPI_STALL_SECONDS") or str(SECONDS)
    aborts = os.environ.get("A2D_MPI_STALL_ABORT") or "0"
    if not re.fullmatch(r"\d+(\.\d*)?", seconds):
        raise ValueError(
            f"A2D_MPI_STALL_SECONDS must be a number of seconds (0: never report), got {seconds!r}"
        )
    if aborts not in ("0", "1"):
        raise ValueError(f"A2D_MPI_STALL_ABORT must be 0 or 1, got {aborts!r}")
    return float(seconds), aborts == "1"
