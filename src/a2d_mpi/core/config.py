"""The description of an attention problem: sizes, shapes and dtypes of its tensors."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from numbers import Real

import numpy as np

from a2d_mpi.core.dtypes import DTYPES, as_dtype, compute_dtype
from a2d_mpi.core.sizes import check_memory, misfit, whole_number

PHASES = ("forward", "backward")
# `a2d_mpi.sharding.distribution` explains them.
DISTRIBUTIONS = ("contiguous", "zigzag", "striped", "triangle", "balanced")
WIRES = ("bfloat16", "mxfp8", "mxfp4")  # formats of messages, see `a2d_mpi.core.wire`
TRANSFERS = ("auto", "device", "host")  # see `a2d_mpi.comm.gpus.gpu_aware`
# With larger sizes, the number of pairs of a sequence or the bytes of a tensor exceed 64 bits.
LARGEST = {
    "seqlen": 1 << 31,
    "nheads": 1 << 16,
    "headdim": 1 << 16,
    "headdim_v": 1 << 16,
    "nheads_kv": 1 << 16,
    "seqlen_kv": 1 << 31,
}
_DEFAULTS = {"nheads_kv": "nheads", "seqlen_kv": "seqlen", "headdim_v": "headdim"}
OF_KEYS = ("k", "v", "dk", "dv")
_STATISTICS = ("lse", "delta", "dlse")
_OF_VALUES = ("v", "dv", "out", "dout")


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes, dtype and scale of the attention over one sequence; the same on all ranks.

    Tensors are named ``q k v out lse dout dlse delta dq dk dv``.

    Parameters
    ----------
    seqlen : int
        N, the number of query tokens of the whole sequence.
    nheads, headdim : int
        H query heads of D elements.
    nheads_kv : int, optional
        KV heads, a divisor of nheads.  Default: nheads.
    dtype : {"float32", "float64", "float16", "bfloat16"} or dtype
        Dtype of all tensors but lse, dlse and delta.  The config keeps its name.
    softmax_scale : float, optional
        Default: ``1 / sqrt(headdim)``.
    seqlen_kv : int, optional
        Number of tokens of k and v, which belong to another sequence in cross-attention.
        Default: seqlen.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  Default: no cap.
    headdim_v : int, optional
        Elements of a head of v, out and their gradients.  Default: headdim.
    wire : str, optional
        Format of messages, one of `WIRES`.  A tensor is encoded if the format
        makes it smaller.  Default: no tensor is encoded.

    Raises
    ------
    ValueError
        If a value is invalid, too large, or not finite.
    """

    seqlen: int
    nheads: int
    headdim: int
    nheads_kv: int | None = None
    _: KW_ONLY
    dtype: str = "float32"
    softmax_scale: float | None = None
    seqlen_kv: int | None = None
    logit_softcap: float | None = None
    headdim_v: int | None = None
    wire: str | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {}
        for name, most in LARGEST.items():
            value = getattr(self, name)
            if value is None and name in _DEFAULTS:
                value = getattr(self, _DEFAULTS[name])
            checked[name] = whole_number(name, value, most=most)
        if checked["nheads"] % checked["nheads_kv"]:
            raise ValueError(
                f"nheads_kv must divide nheads, got {self.nheads_kv} and {self.nheads}"
            )
        checked["dtype"] = as_dtype(self.dtype).name
        scale, cap = self.softmax_scale, self.logit_softcap
        for name, value in (("softmax_scale", scale), ("logit_softcap", cap)):
            if value is not None and not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        checked["softmax_scale"] = 1 / math.sqrt(self.headdim) if scale is None else float(scale)
        if not math.isfinite(checked["softmax_scale"]):
            raise ValueError(f"softmax_scale must be finite, got {scale!r}")
        if self.wire not in (None, *WIRES):
            raise ValueError(f"wire must be None or one of {WIRES}, got {self.wire!r}")
        checked["logit_softcap"] = None if cap is None else float(cap)
        if cap is not None and not 1e-30 <= checked["logit_softcap"] <= 1e30:
            raise ValueError(f"logit_softcap must be between 1e-30 and 1e30, got {cap!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def arguments(self) -> dict[str, object]:
        """Parameters by name, as keyword arguments of a plan."""
        return {x.name: getattr(self, x.name) for x in fields(AttentionConfig)}

    @cached_property
    def compute_dtype(self) -> np.dtype:
        """Dtype of lse, delta, products and sums: float32 or float64."""
        return compute_dtype(DTYPES[self.dtype])

    @property
    def mixed_precision(self) -> bool:
        """True if the storage dtype is narrower than the accumulation dtype."""
        return DTYPES[self.dtype].itemsize < self.compute_dtype.itemsize

    def dtype_of(self, name: str, accumulated: bool = False) -> np.dtype:
        """Return the storage dtype of a tensor or, if `accumulated`, its accumulation dtype."""
        return self.compute_dtype if accumulated or name in _STATISTICS else DTYPES[self.dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one token: (heads, width); for lse, dlse and delta (heads,)."""
        heads = self.nheads_kv if name in OF_KEYS else self.nheads
        width = self.headdim_v if name in _OF_VALUES else self.headdim
        return (heads,) if name in _STATISTICS else (heads, width)

    def nbytes(self, name: str, accumulated: bool = False, wire: bool = False) -> int:
        """Return the bytes of one token of a tensor; the arguments are as in `row`."""
        shape, dtype = self.row(name, accumulated, wire)
        return math.prod(shape) * dtype.itemsize

    def row(
        self, name: str, accumulated: bool = False, wire: bool = False
    ) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype of one token of a tensor.

        Parameters
        ----------
        name : str
            One of the tensors.
        accumulated : bool
            Whether the tensor has the accumulation dtype, as in `dtype_of`.
        wire : bool
            Whether to describe the token in a message.  An encoded token is (heads, bytes) uint8.
            lse, dlse, delta, and tensors that the format would not make smaller, are not encoded.
        """
        shape, dtype = self.shape(name), self.dtype_of(name, accumulated)
        if wire and self.wire and name not in _STATISTICS:
            from a2d_mpi.core.wire import FORMATS

            heads, elements = shape
            width = FORMATS[self.wire].width(elements)
            if width < elements * dtype.itemsize:
                return (heads, width), np.dtype(np.uint8)
        return shape, dtype

    def rounds(self, name: str, accumulated: bool = False) -> bool:
        """Return True if messages hold the tensor encoded; `accumulated` is as in `dtype_of`."""
        return self.row(name, accumulated, wire=True) != self.row(name, accumulated)

    def cp_group(self, heads: int) -> AttentionConfig:
        """Return the config of one context-parallel group, which has 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        problem = misfit(self.nheads, self.nheads_kv, heads)
        if problem:
            raise ValueError(f"a head axis of {heads} ranks: {problem}")
        return replace(
            self, nheads=self.nheads // heads, nheads_kv=max(1, self.nheads_kv // heads)
        )

    def check_room(self, ranks: int) -> None:
        """Refuse a problem that cannot fit, before any code loops over all tokens.

        Raises
        ------
        ValueError
            If q, k and v of one rank exceed the memory of its node.  They are at most a third of
            the memory that the rank needs.
        """
        nbytes = -(-self.seqlen // ranks) * sum(map(self.nbytes, "qkv"))
        check_memory(f"{self.seqlen} tokens on {ranks} ranks: q, k and v of one rank", nbytes)
