"""The protocol of a kernel, and how a user adds one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels import KERNELS, Entry
from a2d_mpi.masks.intervals import Intervals


class Kernel(Protocol):
    """The protocol of a kernel; all arrays are C-contiguous.

    Attributes
    ----------
    name : str
        One of `KERNELS`.
    why : str
        Why "auto" did not take faster kernels; `make_kernel` sets it.
    max_logits : bool, optional
        Whether `forward` takes `largest`.  Default: it is always None.
    rounds_partials : bool, optional
        Whether the kernel computes a partial out in the tensors' dtype.  A wider buffer would then
        cost a copy and hold no more digits.
    fallbacks : Counter, optional
        Blocks so far of which another kernel computed a part, by phase and name of that kernel.
        Default: there are none.
    """

    name: str
    why: str

    def forward(
        self, q: Array, k: Array, v: Array, intervals: Intervals, out: Array, lse: Array, **_: Any
    ) -> None:
        """Overwrite out and lse with the partial result of the block.

        The options are `careful`, and `largest` with the attribute `max_logits`.
        """

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        delta: Array,
        intervals: Intervals,
        dq: Array,
        dk: Array,
        dv: Array,
        fresh: bool = False,
        **_: Any,
    ) -> None:
        """Add the block's gradients to dq, dk and dv; overwrite dq, dk and dv if `fresh`.

        The other options are `careful` and `any_delta`: whether delta may have other values than
        ``rowsum(dout * out)``, because a gradient of lse is subtracted from it.
        """


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
    KERNELS[name] = Entry(make, tuple(dtypes), gpu, softcap, widths)
