"""Stands in for `a2d_mpi.kernels.graphs.Graphs`: cuDNN's attention on the emulated GPU.

It computes what cuDNN computes, from the same pointers, and rounds what cuDNN rounds: factors of
products and results to 16 bits.  Like cuDNN it knows out only by its delta.
"""

import ctypes

import cupy
import numpy as np

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.kernels.graphs import NotSupported


class HostGraphs:
    def __init__(self, refuse=()):
        self.refuse = refuse  # mask shapes for which there is no kernel
        self.launched = []

    def workspace_size(self, block, backward, gradients="native"):
        if block.shape in self.refuse:
            raise NotSupported(block.shape)
        return 100

    def forward(self, block, q, k, v, out, stats, workspace, stream):
        def compute():
            q_, k_, v_, out_ = self._tensors(block, "qkkq", (q, k, v, out))
            visible = self._visible(block)
            found, lse = reference.attention(
                *(x.astype(np.float32) for x in (q_, k_, v_)),
                *(visible, block.scale, np.float32, out_.dtype),
            )
            out_[...] = found
            _array(stats, (block.nheads, block.nq), np.float32)[...] = lse.T

        self._queue(block, compute)

    def backward(
        self, block, q, k, v, out, dout, stats, dq, dk, dv, workspace, stream, gradients="native"
    ):
        def compute():
            inputs = self._tensors(block, "qkkqq", (q, k, v, out, dout))
            dtype = inputs[0].dtype
            q_, k_, v_, out_, dout_ = (x.astype(np.float32) for x in inputs)
            lse = _array(stats, (block.nheads, block.nq), np.float32).T
            assert np.isfinite(lse).all(), "cuDNN makes inf of -inf"
            delta = (dout_ * out_).sum(-1)
            found = reference.attention_backward(
                dout_, q_, k_, v_, lse, delta, self._visible(block), block.scale, np.float32, dtype
            )
            kind = np.dtype(np.float32) if gradients == "float32" else dtype
            for to, x in zip(self._tensors(block, "qkk", (dq, dk, dv), kind), found, strict=True):
                to[...] = x

        self._queue(block, compute)

    def _queue(self, block, compute):
        self.launched.append(block)
        cupy.cuda.get_current_stream()._enqueue(compute)

    def _tensors(self, block, sides, pointers, dtype=None):
        shapes = {
            "q": (block.nq, block.nheads, block.headdim),
            "k": (block.nk, block.nheads_kv, block.headdim),
        }
        dtype = dtype or DTYPES[block.dtype]
        return [_array(p, shapes[s], dtype) for p, s in zip(pointers, sides, strict=True)]

    def _visible(self, block):
        below = np.arange(block.nk) - np.arange(block.nq)[:, None] - (block.nk - block.nq)
        if block.shape == "full":
            return np.ones((block.nq, block.nk), bool)
        seen = below <= 0
        return seen & (below > -block.window) if block.shape == "band" else seen


def _array(pointer, shape, dtype):
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype).reshape(shape)
