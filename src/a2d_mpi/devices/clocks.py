"""Times of the calls of a plan: what a rank did when, by the clock of its device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class Clocks:
    """The times of the latest call of each phase, and of recorded calls; on the host until `use`.

    Attributes
    ----------
    waits : dict of str to list of (float, float)
        Start and end of each MPI wait, by phase; seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.waits: dict[str, list[tuple[float, float]]] = {}
        self._phase = ""
        self._recorded: list[Recorded] | None = None
        self.use(HOST)

    def use(self, device: Device) -> None:
        """Time the work of a device from now on."""
        self._device = device
        self._spans: dict[str, list[tuple[str, Any, Any]]] = {}

    def begin(self, phase: str) -> None:
        """Begin a call of a phase: forget the spans of the call before it."""
        self._phase, self._spans[phase] = phase, []
        if self._recorded is not None:
            self._recorded.append(Recorded(phase, time.perf_counter(), self._spans[phase], []))

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Time a span of the phase; `part` is "compute", "merge" or "total"."""
        start = self._device.mark()
        yield
        self._spans[self._phase].append((part, start, self._device.mark()))

    @contextmanager
    def recording(self) -> Iterator[list[Recorded]]:
        """Record all calls inside a ``with`` statement; the list holds them afterwards."""
        calls = self._recorded = []
        try:
            yield calls
        finally:
            self._recorded = None
        if not calls:
            return
        _, origin, _ = calls[0].spans[-1]
        begin = origin if self._device is HOST else calls[0].begin

        def seconds(mark: Any) -> float:
            return begin + self._device.seconds(origin, mark)

        # Here and not during the calls: on a GPU, reading a time waits for the end of the call.
        for i, call in enumerate(calls):
            spans = [(part, seconds(start), seconds(end)) for part, start, end in call.spans]
            calls[i] = call._replace(spans=spans)

    def noted(self, steps: list[Any]) -> Iterable[Any]:
        """Return the steps of a program; while calls are recorded, note when each begins."""
        return steps if self._recorded is None else self._noted(steps)

    def _noted(self, steps: list[Any]) -> Iterator[Any]:
        _, _, spans, programs = self._recorded[-1]
        times: list[tuple[float, int]] = []
        programs.append(times)
        for step in steps:
            times.append((time.perf_counter(), len(spans)))
            yield step
        times.append((time.perf_counter(), len(spans)))

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the latest calls, by "phase/part": see `AttentionPlan.timings`.

        On a GPU the waits are the gaps between the other parts: the host's waits say nothing,
        because the host runs ahead of the GPU.
        """
        seconds = {}
        for phase, spans in self._spans.items():
            parts = dict.fromkeys(("compute", "merge", "wait", "total"), 0.0)
            for part, start, end in spans:
                parts[part] += self._device.seconds(start, end)
            parts["wait"] = sum(end - start for start, end in self.waits.get(phase, ()))
            if self._device is not HOST:
                parts["wait"] = max(0.0, parts["total"] - parts["compute"] - parts["merge"])
            seconds |= {f"{phase}/{part}": x for part, x in parts.items()}
        return seconds

    def last(self, phase: str) -> Any:
        """Return the mark at the end of the latest call of a phase."""
        _, _, end = self._spans[phase][-1]
        return end
