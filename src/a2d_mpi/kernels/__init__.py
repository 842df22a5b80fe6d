"""Kernels: each computes blocks, attention of some queries over some keys, on one device.

A kernel has two methods, `forward` and `backward`; `a2d_mpi.kernels.numpy.NumpyKernel` documents
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.dtypes import DTYPES, as_dtype, compute_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.masks.intervals import Interval


def _numpy(dtype: np.dtype, softmax_scale: float, device: Device, **options: Any) -> Kernel:
    from a2d_mpi.kernels.numpy import NumpyKernel

    return NumpyKernel(dtype, softmax_scale, **options)


def _numba(dtype: np.dtype, softmax_scale: float, **options: Any) -> Kernel:
    try:
        from a2d_mpi.kernels.compiled import CompiledPasses
    except ImportError as error:
        raise ImportError(f"kernel 'numba' needs Numba (extra numba): {error}") from error
    return _numpy(dtype, softmax_scale, passes=CompiledPasses(compute_dtype(dtype)), **options)


def _cupy(
    dtype: np.dtype, softmax_scale: float, device: Device, logit_softcap: float | None, **_: Any
) -> Kernel:
    from a2d_mpi.kernels.cupy import CupyKernel

    return CupyKernel(device, dtype, softmax_scale, logit_softcap)


def _cudnn(
    *given: Any, work: Workspace | None, deterministic: bool = False, **options: Any
) -> Kernel:
    from a2d_mpi.kernels.cudnn import CudnnKernel

    return CudnnKernel(_cupy(*given, **options), work, deterministic)


class _Entry(NamedTuple):
    """A kernel; see `register_kernel`."""

    make: Callable[..., Kernel]
    dtypes: tuple[str, ...]
    gpu: bool
    softcap: bool
    widths: bool = False


_DETERMINISTIC = partial(_cudnn, deterministic=True)
_ALL, _HALF = tuple(DTYPES), ("float16", "bfloat16")
# A kernel's module is imported when the kernel is made.
KERNELS: dict[str, _Entry | None] = {
    "auto": None,
    "numpy": _Entry(_numpy, _ALL, gpu=False, softcap=True, widths=True),
    # "numpy" with its passes over logits compiled (extra `numba`).
    "numba": _Entry(_numba, (*_HALF, "float32"), gpu=False, softcap=True, widths=True),
    "cupy": _Entry(_cupy, _ALL, gpu=True, softcap=True),
    # Falls back to "cupy" for blocks that cuDNN does not take.  Its gradients are fastest when
    # their sums run in no fixed order; those of "cudnn-deterministic" repeat bit for bit.
    "cudnn": _Entry(_cudnn, _HALF, gpu=True, softcap=False),
    "cudnn-deterministic": _Entry(_DETERMINISTIC, _HALF, gpu=True, softcap=False),
}
# On the host, and on a GPU: the fastest kernel, and the one for all problems.
_FASTEST = {False: ("numba", "numpy"), True: ("cudnn", "cupy")}


class Kernel(Protocol):
    """The two methods of a kernel; arrays are C-contiguous.

    `name` is one of `KERNELS`.

    A kernel on the host has an attribute `careful`, too: see `a2d_mpi.kernels.numpy.NumpyKernel`.
    One with a true attribute `rounds_partials` computes a partial out in the tensors' dtype: a
    wider buffer would cost a copy and hold no more.  A kernel on a GPU gets an attribute
    `any_delta`: true where delta is not ``rowsum(dout * out)``, as a gradient of lse counts in it.
    Calls with ``max_logits`` need a kernel with an attribute `largest`, as NumpyKernel's.
    """

    name: str

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        intervals: tuple[Interval, ...],
        out: Array,
        lse: Array,
    ) -> None:
        """Overwrite out and lse with the partial result of the block."""

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        delta: Array,
        intervals: tuple[Interval, ...],
        dq: Array,
        dk: Array,
        dv: Array,
        fresh: bool = False,
    ) -> None:
        """Add the block's gradients to dq, dk and dv; `fresh`: overwrite dq, dk and dv."""


def register_kernel(
    name: str,
    make: Callable[..., Kernel],
    dtypes: Sequence[str] = tuple(DTYPES),
    gpu: bool = False,
    softcap: bool = False,
    widths: bool = False,
) -> None:
    """Add a kernel of one's own to `KERNELS`: ``kernel=`` and ``--kernel`` then take its name.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and hyphens.
    make : callable
        The class of the kernel, or a function that returns a `Kernel`.  Called with the dtype and
        the softmax scale, and by keyword with `device`, `poll` (a function that a kernel on the
        host calls about every millisecond), `work` (a `a2d_mpi.devices.workspace.Workspace` of
        buffers, or None) and `logit_softcap`.
    dtypes : sequence of str
        Those of the tensors that it takes.
    gpu : bool
        Whether its arrays are CuPy's; default: NumPy's.
    softcap : bool
        Whether it has a soft-cap.
    widths : bool
        Whether it takes values of another width than the keys.

    Raises
    ------
    ValueError
        If the name is taken or no such name, there is no such dtype, or `make` cannot be called.
    """
    if name in KERNELS:
        raise ValueError(f"there is a kernel {name!r} already")
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"a kernel's name must be of a-z, 0-9 and -, got {name!r}")
    if wrong := [x for x in dtypes if x not in DTYPES]:
        raise ValueError(f"kernel {name!r}: dtypes must be of {', '.join(DTYPES)}, got {wrong}")
    if not callable(make):
        raise ValueError(f"kernel {name!r} must be made by a class or function, got {make!r}")
    KERNELS[name] = _Entry(make, tuple(dtypes), gpu, softcap, widths)


def check_kernel(
    kernel: str,
    dtype: np.dtype,
    logit_softcap: float | None = None,
    widths: tuple[int, int] = (0, 0),
) -> None:
    """Raise ValueError if there is no such kernel, or it does not take one of the others.

    `widths`: headdim and headdim_v.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; one of {', '.join(KERNELS)}")
    if kernel != "auto" and (refusal := _refusal(kernel, dtype, logit_softcap, widths)):
        raise ValueError(refusal)


def _refusal(
    kernel: str, dtype: np.dtype, logit_softcap: float | None, widths: tuple[int, int]
) -> str | None:
    """Say why a kernel does not take a dtype, a soft-cap or two widths; None if it does."""
    entry = KERNELS[kernel]
    if dtype not in map(as_dtype, entry.dtypes):
        return f"kernel {kernel!r} takes {', '.join(entry.dtypes)}, not {dtype}"
    if logit_softcap is not None and not entry.softcap:
        return f"kernel {kernel!r} has no soft-cap, got logit_softcap {logit_softcap}"
    if widths[0] != widths[1] and not entry.widths:
        return (
            f"kernel {kernel!r} takes values as wide as the keys, got headdim {widths[0]} and "
            f"headdim_v {widths[1]}"
        )
    return None


def make_kernel(
    kernel: str,
    device: Device,
    dtype: np.dtype,
    softmax_scale: float,
    poll: Callable[[], object] | None = None,
    work: Workspace | None = None,
    logit_softcap: float | None = None,
    widths: tuple[int, int] = (0, 0),
) -> Kernel:
    """Make the kernel of that name on that device ("auto": the fastest for the problem).

    `widths`: headdim and headdim_v, if they differ.

    Raises
    ------
    ValueError
        If there is no such kernel, or the kernel does not take arrays of this device or dtype, a
        soft-cap, or values of another width.
    ImportError
        If CuPy, cuDNN or Numba is asked for by name and not installed.
    """
    options = {"poll": poll or (lambda: None), "work": work, "logit_softcap": logit_softcap}
    if kernel == "auto":
        fastest, kernel = _FASTEST[device is not HOST]
        if not _refusal(fastest, dtype, logit_softcap, widths):
            with suppress(ImportError):
                return make_kernel(fastest, device, dtype, softmax_scale, **options)
    check_kernel(kernel, dtype, logit_softcap, widths)
    entry = KERNELS[kernel]
    if entry.gpu == (device is HOST):
        arrays = "NumPy" if device is HOST else "CuPy"
        raise ValueError(f"kernel {kernel!r} does not take {arrays} arrays")
    made = entry.make(dtype, softmax_scale, device=device, **options)
    for phase in PHASES:
        if not callable(getattr(made, phase, None)):
            raise ValueError(f"kernel {kernel!r}: {type(made).__name__} has no method {phase}")
    made.name = kernel
    return made
