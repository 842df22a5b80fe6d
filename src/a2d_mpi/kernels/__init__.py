"""Kernels: a kernel call computes one block, the attention of queries over keys, on one device.

A kernel has two methods, `forward` and `backward`.  `a2d_mpi.kernels.numpy.NumpyKernel` documents
both.  A kernel may ignore `careful` and `any_delta`, if its results are right without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.dtypes import DTYPES, as_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.masks.intervals import Interval


def _numpy(dtype: np.dtype, softmax_scale: float, device: Device, **options: Any) -> Kernel:
    from a2d_mpi.kernels.numpy import NumpyKernel

    return NumpyKernel(dtype, softmax_scale, **options)


def _numba(dtype: np.dtype, softmax_scale: float, device: Device, **options: Any) -> Kernel:
    try:
        from a2d_mpi.kernels.compiled import NumbaKernel
    except ImportError as error:
        raise ImportError(f"kernel 'numba' needs pip install a2d_mpi[numba]: {error}") from error
    return NumbaKernel(dtype, softmax_scale, **options)


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
    """An entry of `KERNELS`; the fields are the arguments of `register_kernel`."""

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
    # The kernel "numpy" with compiled passes over logits (extra `numba`).
    "numba": _Entry(_numba, (*_HALF, "float32"), gpu=False, softcap=True, widths=True),
    "cupy": _Entry(_cupy, _ALL, gpu=True, softcap=True),
    # Uses "cupy" for blocks that cuDNN does not compute.  Sums of gradients are fastest without a
    # fixed order.  Gradients of "cudnn-deterministic" repeat bit for bit.
    "cudnn": _Entry(_cudnn, _HALF, gpu=True, softcap=False),
    "cudnn-deterministic": _Entry(_DETERMINISTIC, _HALF, gpu=True, softcap=False),
}
# The fastest kernel, and the kernel for all problems, on the host (False) and on a GPU (True).
_FASTEST = {False: ("numba", "numpy"), True: ("cudnn", "cupy")}


class Kernel(Protocol):
    """The protocol of a kernel; all arrays are C-contiguous.

    Attributes
    ----------
    name : str
        One of `KERNELS`.
    max_logits : bool, optional
        Whether `forward` takes `largest`.  Default: it is always None.
    rounds_partials : bool, optional
        Whether the kernel computes a partial out in the tensors' dtype.  A wider buffer would then
        cost a copy and hold no more digits.
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
        careful: bool = False,
        largest: Array | None = None,
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
        careful: bool = False,
        any_delta: bool = False,
    ) -> None:
        """Add the block's gradients to dq, dk and dv; overwrite dq, dk and dv if `fresh`."""


def register_kernel(
    name: str,
    make: Callable[..., Kernel],
    dtypes: Sequence[str] = tuple(DTYPES),
    gpu: bool = False,
    softcap: bool = False,
    widths: bool = False,
) -> None:
    """Add a user's kernel to `KERNELS`, so that ``kernel=`` and ``--kernel`` accept its name.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and hyphens.
    make : callable
        The class of the kernel, or a function that returns a `Kernel`.  The arguments are the
        dtype and the softmax scale, and the keywords `device`, `poll`, `work` and `logit_softcap`.
        A kernel on the host calls the function `poll` about every millisecond.  `work` is a
        `a2d_mpi.devices.workspace.Workspace` of buffers, or None.
    dtypes : sequence of str
        Dtypes of tensors that the kernel computes.
    gpu : bool
        Whether the kernel takes CuPy arrays.  Default: it takes NumPy arrays.
    softcap : bool
        Whether the kernel computes soft-caps.
    widths : bool
        Whether headdim_v may differ from headdim.

    Raises
    ------
    ValueError
        If the name is taken or has other characters, a dtype is unknown, or `make` cannot be
        called.
    """
    if name in KERNELS:
        raise ValueError(f"the name {name!r} of a kernel is taken: choose another name")
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"a kernel's name must consist of a-z, 0-9 and -, got {name!r}")
    if wrong := [x for x in dtypes if x not in DTYPES]:
        raise ValueError(f"kernel {name!r}: dtypes must be of {', '.join(DTYPES)}, got {wrong}")
    if not callable(make):
        raise ValueError(f"kernel {name!r}: make must be a class or function, got {make!r}")
    KERNELS[name] = _Entry(make, tuple(dtypes), gpu, softcap, widths)


def check_kernel(
    kernel: str,
    dtype: np.dtype,
    logit_softcap: float | None = None,
    widths: tuple[int, int] = (0, 0),
) -> None:
    """Raise ValueError if there is no kernel of this name, or it cannot compute a problem.

    Parameters
    ----------
    kernel : str
        One of `KERNELS`.
    dtype : dtype
        Dtype of the tensors.
    logit_softcap : float, optional
    widths : (int, int)
        headdim and headdim_v.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if kernel != "auto" and (refusal := _refusal(kernel, dtype, logit_softcap, widths)):
        raise ValueError(refusal)


def _refusal(
    kernel: str, dtype: np.dtype, logit_softcap: float | None, widths: tuple[int, int]
) -> str | None:
    """Return the reason why a kernel cannot compute a problem; return None if it can."""
    entry = KERNELS[kernel]
    if dtype not in map(as_dtype, entry.dtypes):
        return f"kernel {kernel!r} computes {', '.join(entry.dtypes)}, got {dtype}"
    if logit_softcap is not None and not entry.softcap:
        return f"kernel {kernel!r} computes no soft-cap, got logit_softcap {logit_softcap}"
    if widths[0] != widths[1] and not entry.widths:
        return (
            f"kernel {kernel!r} needs headdim_v equal to headdim, got headdim {widths[0]} and "
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
    """Make a kernel.

    Parameters
    ----------
    kernel : str
        One of `KERNELS`; "auto" is the fastest kernel for the problem.
    device : Device
    dtype : dtype
        Dtype of the tensors.
    softmax_scale : float
    poll : callable, optional
        Function that a kernel on the host calls about every millisecond.
    work : Workspace, optional
        Buffers of the kernel.
    logit_softcap : float, optional
    widths : (int, int)
        headdim and headdim_v, if they differ.

    Raises
    ------
    ValueError
        If there is no kernel of this name, or it cannot compute this problem on this device.
    ImportError
        If the kernel is given by name and CuPy, cuDNN or Numba is missing.
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
