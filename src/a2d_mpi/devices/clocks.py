"""Times of the calls of a plan: what a rank did when, by the clock of its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device

if TYPE_CHECKING:
    from a2d_mpi.devices.recorder import Recorder


class Clocks:
    """The times of the latest call of each phase; on the host until `use`.

    Attributes
    ----------
    device : Device
        Device of the latest calls.
    waits : dict of str to list of (float, float)
        Start and end of each MPI wait, by phase; seconds of `time.perf_counter`.
    recorder : Recorder or None
        Records calls, while there is one.
    """

    def __init__(self) -> None:
        self.waits: dict[str, list[tuple[float, float]]] = {}
        self.recorder: Recorder | None = None
        self._phase = ""
        self.use(HOST)

    def use(self, device: Device) -> None:
        """Time the work of a device from now on."""
        self.device = device
        self._spans: dict[str, list[tuple[str, Any, Any]]] = {}

    def begin(self, phase: str) -> None:
        """Begin a call of a phase: forget the spans of the call before it."""
        self._phase, self._spans[phase] = phase, []
        if self.recorder is not None:
            self.recorder.begin(phase, self._spans[phase])

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Time a span of the phase; `part` is "compute", "merge" or "total"."""
        start = self.device.mark()
        yield
        self._spans[self._phase].append((part, start, self.device.mark()))

    def noted(self, steps: list[Any]) -> Iterable[Any]:
        """Return the steps of a program; while calls are recorded, note when each begins."""
        return steps if self.recorder is None else self.recorder.noted(steps)

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
                parts[part] += self.device.seconds(start, end)
            parts["wait"] = sum(end - start for start, end in self.waits.get(phase, ()))
            if self.device is not HOST:
                parts["wait"] = max(0.0, parts["total"] - parts["compute"] - parts["merge"])
            seconds |= {f"{phase}/{part}": x for part, x in parts.items()}
        return seconds

    def last(self, phase: str) -> Any:
        """Return the mark at the end of the latest call of a phase."""
        _, _, end = self._spans[phase][-1]
        return end
