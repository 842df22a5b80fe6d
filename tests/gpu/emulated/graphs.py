"""Stands in for `a2d_mpi.kernels.graphs.Graphs`: cuDNN's attention on the emulated GPU.

It computes what cuDNN computes, from the same pointers, and rounds what cuDNN rounds: factors of
products and results to 16 bits.  Like cuDNN it knows out only by its delta, and hides keys of a
general mask by a large negative logit: a query that sees none sees all.  A ragged launch reads a
tile past the end of each sequence, and what it finds there must be finite.
"""

import ctypes
import dataclasses
from types import SimpleNamespace

import cupy
import numpy as np

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.kernels.graphs import HIDDEN, NotSupported
from a2d_mpi.kernels.ragged import TILE


class HostGraphs:
    def __init__(self, refuse=()):
        self.refuse = refuse  # mask shapes for which there is no kernel
        self.launched = []
        self.built = set()
        self.rows = 0, 0  # of the tensors of ragged launches, if what these read is to be checked

    def get(self, block, backward):
        if block.shape in self.refuse:
            raise NotSupported(block.shape)
        assert min(block.nq, block.nk) > 0 and not block.nheads % block.nheads_kv
        assert block.nq <= block.nk or block.shape in ("full", "general")
        assert (block.shape == "band") == (block.window > 0)
        assert not block.batch or block.shape != "general"
        assert block.softcap is None or (block.shape in ("full", "general") and not block.batch)
        self.built.add((block, backward))
        return HostLaunch(self, block, backward)


class HostLaunch:
    workspace_size = 100

    def __init__(self, graphs, block, backward):
        self._graphs, self.block, self._is_backward = graphs, block, backward

    def __call__(self, pointers, workspace, stream):
        names = "q k v out dout stats dq dk dv" if self._is_backward else "q k v out stats"
        names = names.split() + ["begin", "end"] * (self.block.shape == "general")
        of_batch = "nq nk of_q of_k of_out of_v of_stats"
        names += of_batch.split() if self.block.batch else []
        to = SimpleNamespace(**dict(zip(names, pointers, strict=True)))
        # The frontend takes any other type for a tensor.
        assert all(type(x) is int for x in (*vars(to).values(), workspace, stream))
        # Tensors are declared with cuDNN's default alignment.
        odd = {x: y % 16 for x, y in vars(to).items() if y % 16}
        assert not odd, f"cuDNN wants addresses of whole 16 bytes: {odd}"
        self._graphs.launched.append(self.block)
        compute = self._backward if self._is_backward else self._forward
        if self.block.batch:
            compute = self._each
        cupy.cuda.get_current_stream()._enqueue(lambda: compute(to))

    def _each(self, at):
        """Compute the sequences of a ragged launch one after the other."""
        block, n, backward = self.block, self.block.batch, self._is_backward
        nq, nk = (_array(x, (n,), np.int32) for x in (at.nq, at.nk))
        assert nq.min() > 0 and nk.min() > 0, "NaN before cuDNN 9.25"
        assert nq.max() <= block.nq and nk.max() <= block.nk
        h, hk, d, e = block.nheads, block.nheads_kv, block.headdim, block.headdim_v
        widths = {"q": h * d, "k": hk * d, "out": h * e, "v": hk * e, "stats": h}
        offsets = {x: _array(getattr(at, f"of_{x}"), (n + 1,), np.int64) for x in widths}
        first = {x: y // widths[x] for x, y in offsets.items()}
        first_q, first_k = first["q"], first["k"]
        assert all((first[x] == first_q).all() for x in ("out", "stats"))
        assert (first["v"] == first_k).all() and (first_q[:-1] + nq <= first_q[1:]).all()
        assert (first_k[:-1] + nk <= first_k[1:]).all(), "gradients of a key are written twice"
        assert not backward or first_q[-1] <= block.total
        for i in range(n):
            own = dataclasses.replace(block, nq=int(nq[i]), nk=int(nk[i]), batch=0, total=0)
            launch, there = HostLaunch(self._graphs, own, backward), SimpleNamespace()
            for x, pointer in vars(at).items():
                of = {"dq": "q", "dk": "k", "dv": "v", "dout": "out"}.get(x, x)
                if of in offsets:
                    nbytes = int(offsets[of][i]) * (4 if x == "stats" else 2)
                    setattr(there, x, pointer + nbytes)
            launch._check_tiles(there, int(first_q[i]), int(first_k[i]))
            stats = _array(there.stats, (own.nq, own.nheads), np.float32)
            there.stats = (turned := np.ascontiguousarray(stats.T)).ctypes.data
            (launch._backward if backward else launch._forward)(there)
            if not backward:
                stats[...] = turned.T

    def _check_tiles(self, at, first_q, first_k):
        """What the last tile of a sequence multiplies by 0."""
        block, dtype, (rows_q, rows_k) = self.block, DTYPES[self.block.dtype], self._graphs.rows
        nq, nk = (-(-x // TILE) * TILE for x in (block.nq, block.nk))
        nq, nk = min(nq, rows_q - first_q), min(nk, rows_k - first_k)
        if rows_k:
            shape = nk, block.nheads_kv
            given = (at.k, block.headdim), (at.v, block.headdim_v)
            _check(*(_array(x, (*shape, d), dtype) for x, d in given))
        if rows_q and self._is_backward:
            shape, e = (nq, block.nheads), block.headdim_v
            given = (at.q, block.headdim), (at.out, e), (at.dout, e)
            _check(*(_array(x, (*shape, d), dtype) for x, d in given))
            assert (_array(at.stats, shape, np.float32) > HIDDEN / 2).all()

    def _forward(self, at):
        block = self.block
        q, k, v, out = self._tensors("qkvo", (at.q, at.k, at.v, at.out))
        _check(k, v)
        visible, lse = self._visible(at), _array(at.stats, (block.nheads, block.nq), np.float32)
        unseeing = ~visible.any(axis=1)
        found, found_lse = reference.attention(
            *(x.astype(np.float32) for x in (q, k, v)),
            *(visible | unseeing[:, None], block.scale, np.float32, out.dtype),
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
        delta = (dout * out).sum(-1)
        found = reference.attention_backward(
            *(dout, q, k, v, lse, delta, self._visible(at), block.scale, np.float32, dtype),
            logit_softcap=block.softcap,
        )
        for to, x in zip(self._tensors("qkv", (at.dq, at.dk, at.dv)), found, strict=True):
            to[...] = x

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

    def _visible(self, at):
        block, key = self.block, np.arange(self.block.nk)
        query = np.arange(block.nq)[:, None]
        last = query + block.nk - block.nq  # the diagonal ends in the last key
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
