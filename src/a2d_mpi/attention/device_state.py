"""The parts of a plan that depend on a device: kernel, buffers, transport to MPI, clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial

import numpy as np

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.config import TRANSFERS, AttentionConfig
from a2d_mpi.devices.clocks import Clocks
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels import check_kernel, make_kernel
from a2d_mpi.kernels.threads import BlasThreads

ROUNDED = ("q", "k", "v", "dout")  # the caller's tensors that travel


class DeviceState:
    """The state of a plan's device: everything that depends on where the arrays are.

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
    blocks : Counter
        Blocks that the kernel has computed so far, by phase and its name.
    clocks : Clocks

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
        self._config = config
        check_kernel(kernel, config.dtype_of("q"))
        if overlap not in (True, False):
            raise ValueError(f"overlap must be true or false, got {overlap!r}")
        if transfers not in TRANSFERS:
            raise ValueError(f"transfers must be one of {TRANSFERS}, got {transfers!r}")
        self._name, self._transfers = kernel, transfers
        self._threads = BlasThreads(threads, grid.cores)
        self._polled = grid.comm if overlap and grid.comm.size > 1 else None
        self.device = self.kernel = self.transport = None
        self.work = Workspace()
        self._works = {HOST: self.work}  # shared with twins
        self.blocks: Counter[tuple[str, str]] = Counter()
        self.clocks = Clocks()

    def twin(self) -> DeviceState:
        """Return a state that shares the buffers, with a kernel and clocks of its own."""
        twin = copy(self)
        twin.device = twin.kernel = twin.transport = None
        twin.blocks, twin.clocks = Counter(), Clocks()
        return twin

    def move_to(self, device: Device) -> None:
        """Use a device, its kernels and its buffers from now on."""
        if device is self.device:
            return
        config, poll = self._config, None
        work = self._works.setdefault(device, Workspace(device))
        transport = Transport() if device is HOST else None
        if transport and self._polled:  # a kernel must not refer back to the state
            poll = partial(transport.poll, self._polled)
        self.kernel = make_kernel(
            self._name, device, config.dtype_of("q"), config.softmax_scale, poll=poll, work=work,
            logit_softcap=config.logit_softcap,
        )  # fmt: skip
        self.device, self.work, self.transport = device, work, transport
        self.blocks.clear()
        self.clocks.use(device)

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
            checked["dlse"] = np.zeros_like(tensors["dlse"])
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

    def round(self, tensors: dict[str, Array]) -> None:
        """Round the tensors that travel to the narrow format, as other ranks receive them."""
        for name in ROUNDED:  # in this order, as timelines show it
            if name in tensors and self._config.rounds(name):
                with self.clocks.span("merge"):
                    tensors[name] = as_sent(self.device, tensors[name], self._config.wire)

    def set_delta(self, tensors: dict[str, Array], sink: Array | None) -> tuple[Array, ...]:
        """Put delta in place of out and dlse; with a sink, return its gradient, (nheads,).

        The gradient is from this rank's tokens.  Programs and kernels know no sink and no gradient
        of lse.
        """
        device = self.device
        with self.clocks.span("compute"):  # delta: (n, nheads)
            delta = tensors["delta"] = device.delta(tensors["dout"], tensors.pop("out"))
            if "dlse" in tensors:
                device.subtract(delta, tensors.pop("dlse"), tensors["lse"])
            return () if sink is None else (device.sink_gradient(tensors["lse"], delta, sink),)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Time a phase from its beginning to its end."""
        self.clocks.begin(phase)
        # The previous call may still use the buffers, perhaps on another stream.
        if self.work.used is not None:
            self.device.after(self.work.used)
        with (
            self.clocks.span("total"),
            self._threads.limited() if self.device is HOST else nullcontext(),
            # No warnings from every rank: overflows and NaN are seen in the results.
            np.errstate(over="ignore", invalid="ignore"),
        ):
            yield
        self.work.used = self.clocks.last(phase)

    def settle(self) -> None:
        """Complete all messages under way, after a rank died."""
        if self.transport is not None:  # before the first call there is none
            self.transport.settle()


def as_sent(device: Device, x: Array, wire: str) -> Array:
    """Return a tensor, (n, heads, headdim), rounded to a narrow format, in a new array."""
    from a2d_mpi.core.wire import FORMATS

    encoded = device.empty((*x.shape[:2], FORMATS[wire].width(x.shape[2])), np.uint8)
    result = device.empty(x.shape, x.dtype)
    device.encode(encoded, x, wire)
    device.decode(result, encoded, wire)
    return result
