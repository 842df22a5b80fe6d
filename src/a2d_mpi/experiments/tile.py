"""One tile of random numbers for the kernels on the host; no MPI import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.kernels import Kernel
from a2d_mpi.masks.mask import Mask

SAMPLE = 8  # queries, and keys, whose results are checked


class Tile:
    """Random tensors of a tile, and room for what a kernel makes of them.

    Parameters
    ----------
    nq, nk : int
        Queries and keys; their tokens begin with 0.
    nheads, nheads_kv, headdim : int
    mask : Mask
    dtype : str

    Attributes
    ----------
    q, dout : (nq, nheads, headdim) dtype
    k, v : (nk, nheads_kv, headdim) dtype
    out : (nq, nheads, headdim) accumulation dtype
    lse, delta : (nq, nheads) accumulation dtype
    gradients : list of array
        dq, dk and dv, in the accumulation dtype.
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
    ) -> None:
        rng, storage = np.random.default_rng(0), as_dtype(dtype)
        accumulation = compute_dtype(storage)
        self.q, self.dout = (
            rng.standard_normal((nq, nheads, headdim)).astype(storage) for _ in range(2)
        )
        self.k, self.v = (
            rng.standard_normal((nk, nheads_kv, headdim)).astype(storage) for _ in range(2)
        )
        self.mask, self._tokens = mask, (np.arange(nq), np.arange(nk))
        self.intervals = mask.intervals(*self._tokens)
        self.area = mask.area(*self._tokens)
        self.out = np.empty((nq, nheads, headdim), accumulation)
        self.lse = np.empty((nq, nheads), accumulation)
        self.delta = np.zeros_like(self.lse)
        self.gradients = [np.zeros(x.shape, accumulation) for x in (self.q, self.k, self.v)]

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(headdim)."""
        return self.q.shape[-1] ** -0.5

    def forward(self, kernel: Kernel) -> None:
        """Compute out and lse."""
        kernel.forward(self.q, self.k, self.v, self.intervals, self.out, self.lse)

    def backward(self, kernel: Kernel, fresh: bool = False) -> None:
        """Add to the gradients, or overwrite them; lse and delta are those of earlier calls."""
        given = self.dout, self.q, self.k, self.v, self.lse, self.delta, self.intervals
        kernel.backward(*given, *self.gradients, fresh=fresh)

    def all_of_backward(self, kernel: Kernel) -> None:
        """Compute delta and the gradients, as autograd does."""
        np.einsum("thd,thd->th", self.dout, self.out, out=self.delta)
        self.backward(kernel, fresh=True)

    def calls(self, kernel: Kernel) -> dict[str, Callable[[], None]]:
        """The calls of a kernel, by phase."""
        return {
            "forward": partial(self.forward, kernel),
            "backward": partial(self.all_of_backward, kernel),
        }

    def error(self) -> float:
        """Largest error of out and the gradients, of a sample of rows, against float64."""
        (nq, nk), scale = map(len, self._tokens), self.softmax_scale
        rng = np.random.default_rng(1)
        queries, keys = (np.unique(rng.integers(0, n, SAMPLE)) for n in (nq, nk))
        seen = self.mask.dense(queries, self._tokens[1])
        out, lse = reference.attention(self.q[queries], self.k, self.v, seen, scale)
        given = self.dout[queries], self.q[queries], self.k, self.v, lse
        dq, _, _ = reference.attention_backward(*given, self.delta[queries], seen, scale)
        given = self.dout, self.q, self.k[keys], self.v[keys], self.lse, self.delta
        seen = self.mask.dense(self._tokens[0], keys)
        _, dk, dv = reference.attention_backward(*given, seen, scale)
        found = (
            self.out[queries],
            *(x[rows] for x, rows in zip(self.gradients, (queries, keys, keys))),
        )
        return float(np.max([np.abs(x - y).max() for x, y in zip(found, (out, dq, dk, dv))]))
