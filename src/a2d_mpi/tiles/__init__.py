"""Tile kernels: attention of some queries over some keys on one device.

A kernel has two methods, `forward` and `backward`; `a2d_mpi.tiles.numpy.NumpyTile` documents them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from a2d_mpi.backend import Workspace
from a2d_mpi.masks import Interval
from a2d_mpi.tiles.numpy import NumpyTile

KERNELS = ("auto", "numpy")


class Tile(Protocol):
    """What an algorithm asks of a kernel."""

    def forward(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        intervals: tuple[Interval, ...],
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        """Overwrite out and lse with the partial result."""

    def backward(
        self,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        lse: np.ndarray,
        delta: np.ndarray,
        intervals: tuple[Interval, ...],
        dq: np.ndarray,
        dk: np.ndarray,
        dv: np.ndarray,
    ) -> None:
        """Add the partial gradients to dq, dk and dv."""


def make_tile(
    kernel: str,
    dtype: np.dtype,
    softmax_scale: float,
    poll: Callable[[], object] | None = None,
    work: Workspace | None = None,
) -> Tile:
    """The kernel of that name ("auto": the fastest for the dtype)."""
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; one of {KERNELS}")
    return NumpyTile(dtype, softmax_scale, poll, work=work)
