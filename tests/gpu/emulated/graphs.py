"""Stands in for `a2d_mpi.kernels.graphs.Graphs`: cuDNN's attention on the emulated GPU.

It computes what cuDNN computes, from the same pointers, and rounds what cuDNN rounds: factors of
products and results to 16 bits.  Like cuDNN it knows out only by its delta, and hides keys of a
general mask by a large negative logit: a query that sees none sees all.  Rows beyond the numbers
of queries and keys of a padded launch must be finite in its inputs, and are NaN in its results.
"""

import ctypes
from types import SimpleNamespace

import cupy
import numpy as np

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.kernels.graphs import HIDDEN, NotSupported


class HostGraphs:
    def __init__(self, refuse=()):
        self.refuse = refuse  # mask shapes for which there is no kernel
        self.launched = []
        self.built = set()

    def get(self, block, backward):
        if block.shape in self.refuse:
            raise NotSupported(block.shape)
        assert min(block.nq, block.nk) > 0 and not block.nheads % block.nheads_kv
        assert block.nq <= block.nk or block.shape in ("full", "general")
        assert (block.shape == "band") == (block.window > 0)
        assert not block.padded or (block.shape != "general" and block.softcap is None)
        assert block.softcap is None or block.shape in ("full", "general")
        self.built.add((block, backward))
        return HostLaunch(self, block, backward)


class HostLaunch:
    workspace_size = 100

    def __init__(self, graphs, block, backward):
        self._graphs, self.block, self._is_backward = graphs, block, backward

    def __call__(self, pointers, workspace, stream):
        names = "q k v out dout stats dq dk dv" if self._is_backward else "q k v out stats"
        names = names.split() + ["begin", "end"] * (self.block.shape == "general")
        names += ["nq", "nk"] * self.block.padded
        to = SimpleNamespace(**dict(zip(names, pointers, strict=True)))
        # The frontend takes any other type for a tensor.
        assert all(type(x) is int for x in (*vars(to).values(), workspace, stream))
        # Tensors are declared with cuDNN's default alignment.
        odd = {x: y % 16 for x, y in vars(to).items() if y % 16}
        assert not odd, f"cuDNN wants addresses of whole 16 bytes: {odd}"
        self._graphs.launched.append(self.block)
        compute = self._backward if self._is_backward else self._forward
        cupy.cuda.get_current_stream()._enqueue(lambda: compute(to))

    def _forward(self, at):
        block = self.block
        q, k, v, out = self._tensors("qkvo", (at.q, at.k, at.v, at.out))
        _check(q, k, v)
        lse = _array(at.stats, (block.nheads, block.nq), np.float32)
        nq, nk = self._numbers(at)
        out[nq:], lse[:, nq:] = np.nan, np.nan
        q, k, v, out, lse = q[:nq], k[:nk], v[:nk], out[:nq], lse[:, :nq]
        visible = self._visible(at, nq, nk)
        unseeing = ~visible.any(axis=1)
        found, found_lse = reference.attention(
            *(x.astype(np.float32) for x in (q, k, v)),
            visible | unseeing[:, None],
            block.scale,
            dtype=np.float32,
            products=out.dtype,
            logit_softcap=block.softcap,
        )
        found_lse[unseeing] = HIDDEN
        out[...], lse[...] = found, found_lse.T

    def _backward(self, at):
        block, given = self.block, (at.q, at.k, at.v, at.out, at.dout)
        inputs = self._tensors("qkvoo", given)
        dtype = inputs[0].dtype
        q, k, v, out, dout = (x.astype(np.float32) for x in inputs)
        _check(q, k, v, out, dout)
        lse = _array(at.stats, (block.nheads, block.nq), np.float32).T
        assert (lse > HIDDEN / 2).all(), "cuDNN makes inf of -inf"
        nq, nk = self._numbers(at)
        assert (lse[nq:] == np.inf).all(), "rows beyond the last query count"
        q, out, dout, lse, k, v = *(x[:nq] for x in (q, out, dout, lse)), k[:nk], v[:nk]
        delta, visible = (dout * out).sum(-1), self._visible(at, nq, nk)
        options = {"dtype": np.float32, "products": dtype, "logit_softcap": block.softcap}
        found = reference.attention_backward(
            dout, q, k, v, lse, delta, visible, block.scale, **options
        )
        for to, x in zip(self._tensors("qkv", (at.dq, at.dk, at.dv)), found, strict=True):
            to[: len(x)], to[len(x) :] = x, np.nan

    def _tensors(self, sides, pointers):
        block = self.block
        shapes = {
            "q": (block.nq, block.nheads, block.headdim),
            "k": (block.nk, block.nheads_kv, block.headdim),
            "v": (block.nk, block.nheads_kv, block.headdim_v),
            "o": (block.nq, block.nheads, block.headdim_v),
        }
        dtype = DTYPES[block.dtype]
        return [_array(p, shapes[s], dtype) for p, s in zip(pointers, sides, strict=True)]

    def _numbers(self, at):
        """Return the numbers of queries and keys."""
        if not self.block.padded:
            return self.block.nq, self.block.nk
        nq, nk = (int(_array(x, (1,), np.int32)[0]) for x in (at.nq, at.nk))
        assert 0 < nq <= self.block.nq and 0 < nk <= self.block.nk
        return nq, nk

    def _visible(self, at, nq, nk):
        block, key, query = self.block, np.arange(nk), np.arange(nq)[:, None]
        last = query + nk - nq  # the diagonal ends in the last key
        if block.shape == "general":
            begin, end = (_array(x, (block.nq, 1), np.int32) for x in (at.begin, at.end))
            return (key >= begin) & (key < end)
        if block.shape == "anti-causal":
            return key >= query
        seen = (key <= last) | (block.shape == "full")
        return seen & (key > last - block.window) if block.shape == "band" else seen


def _check(*arrays):
    for x in arrays:
        assert np.isfinite(x.astype(np.float32)).all(), "cuDNN multiplies what is hidden by 0"


def _array(pointer, shape, dtype):
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype).reshape(shape)
