"""A tile of random numbers on which kernels are timed and checked; no MPI import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.kernels import Kernel
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.masks.mask import Mask

SAMPLE = 8  # number of queries, and of keys, whose results are checked


class RandomTile:
    """Random tensors of a tile, and arrays for a kernel's results.

    Parameters
    ----------
    nq, nk : int
        Number of queries and keys; the tokens of both begin at 0.
    nheads, nheads_kv, headdim : int
    mask : Mask
    dtype : str
        Storage dtype.
    device : Device

    Attributes
    ----------
    q, dout : (nq, nheads, headdim) dtype
    k, v : (nk, nheads_kv, headdim) dtype
    out : (nq, nheads, headdim) dtype
    lse, delta : (nq, nheads) accumulation dtype
    gradients : list of array
        dq, dk and dv.
    area : int
        Visible pairs.
    """

    def __init__(
        self,
        nq: int,
        nk: int,
        nheads: int,
        nheads_kv: int,
        headdim: int,
        mask: Mask,
        dtype: str = "float32",
        device: Device = HOST,
    ) -> None:
        rng, storage = np.random.default_rng(0), as_dtype(dtype)
        queries, keys = (nq, nheads, headdim), (nk, nheads_kv, headdim)
        self.q, self.dout, self.k, self.v = (
            device.upload(rng.standard_normal(shape).astype(storage))
            for shape in (queries, queries, keys, keys)
        )
        self.device, self.mask, self._tokens = device, mask, (np.arange(nq), np.arange(nk))
        self.intervals = Intervals.of(mask.intervals(*self._tokens))
        self.area = mask.area(*self._tokens)
        self.out = device.empty(queries, storage)
        self.lse = device.empty((nq, nheads), compute_dtype(storage))
        self.gradients = [device.empty(x, storage) for x in (queries, keys, keys)]

    @property
    def softmax_scale(self) -> float:
        """Scale of logits: 1 / sqrt(headdim)."""
        return self.q.shape[-1] ** -0.5

    def forward(self, kernel: Kernel) -> None:
        """Compute out and lse."""
        kernel.forward(self.q, self.k, self.v, self.intervals, self.out, self.lse)

    def backward(self, kernel: Kernel) -> None:
        """Compute delta and the gradients; autograd computes delta in its backward pass, too."""
        self.delta = self.device.delta(self.dout, self.out)
        given = self.dout, self.q, self.k, self.v, self.lse, self.delta, self.intervals
        kernel.backward(*given, *self.gradients, fresh=True)

    def calls(self, kernel: Kernel) -> dict[str, Callable[[], None]]:
        """Return the calls of a kernel by phase; a backward call needs a forward call before."""
        return {
            "forward": partial(self.forward, kernel),
            "backward": partial(self.backward, kernel),
        }

    def error(self) -> float:
        """Compute the largest error of out, dq, dk and dv, relative to their largest values.

        A sample of rows is compared with float64.  The error is NaN if a result is NaN.
        """
        names = ("q", "k", "v", "dout", "out", "lse", "delta")
        q, k, v, dout, out, lse, delta = (self.device.download(getattr(self, x)) for x in names)
        dq, dk, dv = map(self.device.download, self.gradients)
        rng, scale = np.random.default_rng(1), self.softmax_scale
        queries, keys = (np.unique(rng.integers(0, len(x), SAMPLE)) for x in (q, k))
        seen = self.mask.dense(queries, self._tokens[1])
        exact, exact_lse = reference.attention(q[queries], k, v, seen, scale)
        given = dout[queries], q[queries], k, v, exact_lse
        exact_dq, _, _ = reference.attention_backward(*given, delta[queries], seen, scale)
        seen = self.mask.dense(self._tokens[0], keys)
        given = dout, q, k[keys], v[keys], lse, delta
        _, exact_dk, exact_dv = reference.attention_backward(*given, seen, scale)
        pairs = (
            (out[queries], exact),
            (dq[queries], exact_dq),
            (dk[keys], exact_dk),
            (dv[keys], exact_dv),
        )
        errors = [np.abs(x - y).max() / max(np.abs(y).max(), 1e-30) for x, y in pairs]
        return float(np.max(errors))
