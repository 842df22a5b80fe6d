"""The parts of a plan that depend on a device: kernel, buffers, transport to MPI, clocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.transport import HostTransport, Transport
from a2d_mpi.core.config import TRANSFERS, AttentionConfig
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels import check_kernel, make_kernel
from a2d_mpi.kernels.threads import BlasThreads

if TYPE_CHECKING:
    from a2d_mpi.kernels.protocol import Kernel

_NOTHING = nullcontext()


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


class Engine:
    """Everything of a plan that depends on the device of the arrays.

    Parameters
    ----------
    kernel : str
        One of `a2d_mpi.kernels.KERNELS`.
    config : AttentionConfig
    transfers : {"auto", "device", "host"}
    overlap : bool
        Let kernels on the host poll MPI between their blocks.
    grid : ProcessGrid
    threads : int or None
        BLAS threads of kernels on the host; None: the cores of a rank.

    Attributes
    ----------
    device, kernel, work, transport
        The device, its kernel, its buffers and its transport.  All but `work` are None until the
        first call.
    waits : dict of str to list of (float, float)
        Start and end of each MPI wait, by phase; seconds of `time.perf_counter`.

    Raises
    ------
    ValueError
        If no kernel of this name takes the dtype, or transfers, overlap or threads is invalid.
    """

    def __init__(
        self,
        kernel: str,
        config: AttentionConfig,
        transfers: str,
        overlap: bool,
        grid: ProcessGrid,
        threads: int | None,
    ) -> None:
        self._config, self._widths = config, (config.headdim, config.headdim_v)
        check_kernel(kernel, config.dtype_of("q"), config.logit_softcap, self._widths)
        if overlap not in (True, False):
            raise ValueError(f"overlap must be true or false, got {overlap!r}")
        if transfers not in TRANSFERS:
            raise ValueError(f"transfers must be one of {TRANSFERS}, got {transfers!r}")
        self._name, self._transfers = kernel, transfers
        self._threads = BlasThreads(threads, grid.cores)
        self._polled = grid.comm if overlap and grid.comm.size > 1 else None
        self.device: Device | None = None
        self.kernel: Kernel | None = None
        self.transport: Transport | None = None
        self.work = Workspace()
        self._works = {HOST: self.work}  # shared with twins
        self.waits: dict[str, list[tuple[float, float]]] = {}
        self._spans: dict[str, list[tuple[str, Any, Any]]] = {}
        self._phase = ""
        self._recorded: list[Recorded] | None = None
        self._nvtx: ModuleType | None = None

    def twin(self) -> Engine:
        """Return an engine that shares the buffers, with a kernel and clocks of its own."""
        twin = copy(self)
        twin.device = twin.kernel = twin.transport = None
        twin.waits, twin._spans = {}, {}
        return twin

    def move_to(self, device: Device) -> None:
        """Use a device, its kernels and its buffers from now on."""
        if device is self.device:
            return
        config, poll = self._config, None
        work = self._works.setdefault(device, Workspace(device))
        transport = HostTransport() if device is HOST else None
        if transport and self._polled:  # a kernel must not refer back to the engine
            poll = partial(transport.poll, self._polled)
        kind = config.dtype_of("q"), config.softmax_scale
        self.kernel = make_kernel(
            self._name, device, *kind, poll, work, config.logit_softcap, self._widths
        )
        self.device, self.work, self.transport = device, work, transport
        self._spans, self._nvtx = {}, None
        if device is not HOST:
            with suppress(ImportError):  # names ranges for NVIDIA's profilers
                self._nvtx = import_module("nvtx")

    def prepared(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], bool]:
        """Make the arrays C-contiguous, and check whether all elements are finite.

        Two values of -inf are valid: lse of a masked row, and a sink that is switched off.  Where
        lse is -inf, dlse may hold anything.

        Returns
        -------
        dict of str to array
            C-contiguous arrays by name.
        bool
            Whether all elements are finite.  On a GPU True without a check, which would wait.
        """
        device = self.device
        tensors = {name: device.contiguous(x) for name, x in arrays.items()}
        if device is not HOST:
            return tensors, True
        checked = dict(tensors)
        if "dlse" in tensors:
            checked["dlse"] = device.empty(tensors["dlse"].shape, tensors["dlse"].dtype)
            device.zero(checked["dlse"])
            device.subtract(checked["dlse"], tensors["dlse"], tensors["lse"])
        lowest = ("lse", "sink")
        return tensors, all(HOST.finite(x, lowest=name in lowest) for name, x in checked.items())

    @property
    def staged(self) -> bool:
        """True if tensors of this rank go through host memory, because MPI cannot read them."""
        if self.device is HOST:
            return False
        from a2d_mpi.comm.gpus import gpu_aware

        return not gpu_aware(self._transfers)[0]

    def choose_transport(self, staged: bool) -> None:
        """Take a transport for device arrays, through host memory if `staged`.

        `staged` must be the same on all ranks.
        """
        if self.device is not HOST and getattr(self.transport, "staged", None) is not staged:
            from a2d_mpi.comm.device_transport import DeviceTransport

            self.transport = DeviceTransport(self.device, staged)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Time a phase from its beginning to its end."""
        self._phase, self._spans[phase] = phase, []
        if self._recorded is not None:
            self._recorded.append(Recorded(phase, time.perf_counter(), self._spans[phase], []))
        # The previous call may still use the buffers, perhaps on another stream.
        if self.work.used is not None:
            self.device.after(self.work.used)
        with (
            self.clock("total"),
            self._threads.limited() if self.device is HOST else nullcontext(),
            # No warnings from every rank: overflows and NaN are seen in the results.
            np.errstate(over="ignore", invalid="ignore"),
        ):
            yield
        *_, (_, _, self.work.used) = self._spans[phase]

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Time a span of the phase; `part` is "compute", "merge" or "total"."""
        start = self.device.mark()
        with self._nvtx.annotate(f"{self._phase} {part}") if self._nvtx else _NOTHING:
            yield
        self._spans[self._phase].append((part, start, self.device.mark()))

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
        begin = origin if self.device is HOST else calls[0].begin

        def seconds(mark: Any) -> float:
            return begin + self.device.seconds(origin, mark)

        # Here and not during the calls: on a GPU, reading a time waits for the end of the call.
        for i, call in enumerate(calls):
            spans = [(part, seconds(start), seconds(end)) for part, start, end in call.spans]
            calls[i] = call._replace(spans=spans)

    def clocked(self, steps: list[tuple]) -> Iterable[tuple]:
        """Return the steps of a program; while calls are recorded, note when each begins."""
        return steps if self._recorded is None else self._noted(steps)

    def _noted(self, steps: list[tuple]) -> Iterator[tuple]:
        _, _, spans, programs = self._recorded[-1]
        times: list[tuple[float, int]] = []
        programs.append(times)
        for step in steps:
            times.append((time.perf_counter(), len(spans)))
            yield step
        times.append((time.perf_counter(), len(spans)))

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the latest calls, by "phase/part": see `AttentionPlan.timings`."""
        seconds = {}
        for phase in self._spans:
            seconds |= {f"{phase}/{x}": 0.0 for x in ("compute", "merge", "wait", "total")}
            for part, start, end in self.spans(phase):
                seconds[f"{phase}/{part}"] += end - start
        return seconds

    def spans(self, phase: str) -> list[tuple[str, float, float]]:
        """Return the spans of the latest call of a phase, in the order of time.

        Returns
        -------
        list of (str, float, float)
            Part ("compute", "merge" or "wait"), start and end in seconds since the phase began.
            The last entry is ("total", 0, end of the phase).  Empty if there was no call.  On a
            GPU the waits are the gaps between the other parts.
        """
        *busy, (_, origin, last) = self._spans.get(phase) or [(None, None, None)]
        if origin is None:
            return []
        since = self.device.seconds
        parts = [(part, since(origin, start), since(origin, end)) for part, start, end in busy]
        total = since(origin, last)
        if self.device is HOST:
            parts += [("wait", a - origin, b - origin) for a, b in self.waits.get(phase, [])]
        else:  # the host's waits say nothing: the host runs ahead of the GPU
            ends = [0.0, *(end for *_, end in parts)]
            starts = [*(start for _, start, _ in parts), total]
            parts += [("wait", a, b) for a, b in zip(ends, starts) if b > a]
        return [*sorted(parts, key=lambda span: span[1]), ("total", 0.0, total)]

    def settle(self) -> None:
        """Complete all messages under way, after a rank died."""
        if self.transport is not None:  # before the first call there is none
            self.transport.settle()

    @property
    def staged_bytes(self) -> int:
        """Bytes copied between device and host so far."""
        return getattr(self.transport, "staged_bytes", 0)
