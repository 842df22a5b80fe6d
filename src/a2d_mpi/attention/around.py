"""Work of a call around its programs: rounding, delta, gradient of the sink, largest logits.

Programs and kernels know no sink and no gradient of lse, and they take tensors that are rounded to
the narrow format already.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.device_state import DeviceState
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.devices.protocol import Array, Device

ROUNDED = ("q", "k", "v", "dout")  # the caller's tensors that travel


def round_tensors(state: DeviceState, config: AttentionConfig, tensors: dict[str, Array]) -> None:
    """Round the tensors that travel as other ranks receive them, before a phase."""
    for name in filter(tensors.__contains__, ROUNDED if config.wire else ()):
        if config.rounds(name):
            with state.clocks.span("merge"):
                tensors[name] = as_sent(state.device, tensors[name], config.wire)


def as_sent(device: Device, x: Array, wire: str) -> Array:
    """Return a tensor, (n, heads, headdim), rounded to a narrow format, in a new array."""
    from a2d_mpi.core.wire import FORMATS

    encoded = device.empty((*x.shape[:2], FORMATS[wire].width(x.shape[2])), np.uint8)
    result = device.empty(x.shape, x.dtype)
    device.encode(encoded, x, wire)
    device.decode(result, encoded, wire)
    return result


def set_delta(
    state: DeviceState, tensors: dict[str, Array], sink: Array | None
) -> tuple[Array, ...]:
    """Put delta in place of out and dlse, before the backward pass.

    Returns
    -------
    tuple of (nheads,) array
        With a sink, its gradient from this rank's tokens.
    """
    device = state.device
    with state.clocks.span("compute"):  # delta: (n, nheads)
        delta = tensors["delta"] = device.delta(tensors["dout"], tensors.pop("out"))
        if "dlse" in tensors:
            device.subtract(delta, tensors.pop("dlse"), tensors["lse"])
        return () if sink is None else (device.sink_gradient(tensors["lse"], delta, sink),)


def largest_of_all(grid: ProcessGrid, watch: Watch, own: np.ndarray) -> np.ndarray:
    """Reduce the largest logits of each rank's heads; the result is (nheads,) on all ranks."""
    largest = np.full(len(own) * grid.heads, -np.inf, own.dtype)
    # NaN becomes inf: MPI's maximum of a number and NaN may differ between ranks.
    largest[grid.head * len(own) :][: len(own)] = np.where(np.isnan(own), np.inf, own)
    with watch.waiting("for the largest logits"):
        grid.comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    return largest
