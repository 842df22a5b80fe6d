"""A record of the calls of a plan: what a rank did when, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from a2d_mpi.devices.clocks import Clocks
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device


class Recorded(NamedTuple):
    """One call of a plan, with its times: seconds of `time.perf_counter`.

    Attributes
    ----------
    phase : str
    begin : float
    spans : list of (str, float, float)
        Part, begin and end, in the order in which the host queued them; the last part is "total".
    programs : list of list of (float, int)
        For each program of the phase, the begin of each step and the number of `spans` before it.
        The last entry is for the end of the program.
    """

    phase: str
    begin: float
    spans: list[tuple[str, Any, Any]]
    programs: list[list[tuple[float, int]]]


class Recorder:
    """The calls that `recording` records."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []

    def begin(self, phase: str, spans: list[tuple[str, Any, Any]]) -> None:
        """Begin a call, whose spans will be in the list."""
        self.calls.append(Recorded(phase, time.perf_counter(), spans, []))

    def noted(self, steps: list[Any]) -> Iterator[Any]:
        """Yield the steps of a program, and note when each begins."""
        _, _, spans, programs = self.calls[-1]
        times: list[tuple[float, int]] = []
        programs.append(times)
        for step in steps:
            times.append((time.perf_counter(), len(spans)))
            yield step
        times.append((time.perf_counter(), len(spans)))

    def read(self, device: Device) -> None:
        """Replace the marks of the device by seconds."""
        if not self.calls:
            return
        _, origin, _ = self.calls[0].spans[-1]
        begin = origin if device is HOST else self.calls[0].begin
        for i, call in enumerate(self.calls):
            spans = [
                (part, *(begin + device.seconds(origin, x) for x in marks))
                for part, *marks in call.spans
            ]
            self.calls[i] = call._replace(spans=spans)


@contextmanager
def recording(clocks: Clocks) -> Iterator[list[Recorded]]:
    """Record all calls inside a ``with`` statement; the list holds them afterwards."""
    recorder = clocks.recorder = Recorder()
    try:
        yield recorder.calls
    finally:
        clocks.recorder = None
    # Here and not during the calls: on a GPU, reading a time waits for the end of the call.
    recorder.read(clocks.device)
