"""The protocol of a kernel."""

from __future__ import annotations

from typing import Any, Protocol

from a2d_mpi.devices.protocol import Array
from a2d_mpi.masks.intervals import Intervals


class Kernel(Protocol):
    """The protocol of a kernel; all arrays are C-contiguous.

    Attributes
    ----------
    name : str
        One of `KERNELS`.
    why : str
        Why "auto" did not take faster kernels; `make_kernel` sets it.
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

        The option is `careful`.
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
