"""Kernels: a kernel call computes one block, the attention of queries over keys, on one device.

A kernel has two methods, `forward` and `backward`.  `a2d_mpi.kernels.numpy.NumpyKernel` documents
both.  A kernel may ignore `careful` and `any_delta`, if its results are right without them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.dtypes import DTYPES, as_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.devices.workspace import Workspace

if TYPE_CHECKING:
    from a2d_mpi.kernels.protocol import Kernel


class Entry(NamedTuple):
    """An entry of `KERNELS`; the fields are arguments of `register_kernel`.

    The module and the class of a kernel of the package are a text: they are imported when needed.
    """

    make: Callable[..., Kernel] | str
    dtypes: tuple[str, ...]
    gpu: bool = False


_ALL, _HALF = tuple(DTYPES), ("float16", "bfloat16")
KERNELS: dict[str, Entry | None] = {
    "auto": None,
    "numpy": Entry("numpy:NumpyKernel", _ALL),
    # The kernel "numpy" with compiled passes over logits (extra `numba`).
    "numba": Entry("compiled:NumbaKernel", (*_HALF, "float32")),
    # Products by oneDNN (extra `onednn`).
    "onednn": Entry("onednn:OneDnnKernel", ("bfloat16",)),
    "cupy": Entry("cupy:CupyKernel", _ALL, gpu=True),
    # Uses "cupy" for blocks that cuDNN does not compute.
    "cudnn": Entry("cudnn:CudnnKernel", _HALF, gpu=True),
}
# On the host (False) and on a GPU (True): the kernels from the fastest one to the one for all
# problems.
_FASTEST = {False: ("onednn", "numba", "numpy"), True: ("cudnn", "cupy")}


def check_kernel(kernel: str, dtype: np.dtype) -> None:
    """Raise ValueError if there is no kernel of this name, or it does not compute a dtype."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    entry = KERNELS[kernel]
    if entry is not None and dtype not in map(as_dtype, entry.dtypes):
        raise ValueError(f"kernel {kernel!r} computes {', '.join(entry.dtypes)}, got {dtype}")


def make_kernel(
    kernel: str,
    device: Device,
    dtype: np.dtype,
    softmax_scale: float,
    poll: Callable[[], object] | None = None,
    work: Workspace | None = None,
    logit_softcap: float | None = None,
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

    Raises
    ------
    ValueError
        If there is no kernel of this name, or it cannot compute this problem on this device.
    ImportError
        If the kernel is given by name and CuPy, cuDNN or Numba is missing.
    """
    why: list[str] = []
    if kernel == "auto":
        *faster, kernel = _FASTEST[device is not HOST]
        for name in faster:
            if dtype not in map(as_dtype, KERNELS[name].dtypes):
                continue
            try:
                made = make_kernel(name, device, dtype, softmax_scale, poll, work, logit_softcap)
                made.why = "; ".join(why)
                return made
            except (ImportError, ValueError) as error:  # not installed, or it cannot compute this
                why.append(str(error))
                if device is not HOST and isinstance(error, ImportError):  # many times slower
                    warnings.warn(f"kernel {kernel!r} computes: {error}", RuntimeWarning, 2)
    check_kernel(kernel, dtype)
    entry = KERNELS[kernel]
    if entry.gpu == (device is HOST):
        arrays = "NumPy" if device is HOST else "CuPy"
        raise ValueError(f"kernel {kernel!r} does not take {arrays} arrays")
    make = entry.make
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(import_module(f"a2d_mpi.kernels.{module}"), name)
    elif logit_softcap and "logit_softcap" not in inspect.signature(make).parameters:
        raise ValueError(f"kernel {kernel!r} does not take logit_softcap")
    made = make(
        dtype, softmax_scale, device=device, poll=poll or (lambda: None), work=work,
        logit_softcap=logit_softcap,
    )  # fmt: skip
    for phase in PHASES:
        if not callable(getattr(made, phase, None)):
            raise ValueError(f"kernel {kernel!r}: {type(made).__name__} has no method {phase}")
    made.name, made.why = kernel, "; ".join(why)
    return made
