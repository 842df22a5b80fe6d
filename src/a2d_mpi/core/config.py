"""One frozen description of an attention problem: sizes, shapes and dtypes of its tensors."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property

import numpy as np

from a2d_mpi.core.dtypes import DTYPES, as_dtype, compute_dtype
from a2d_mpi.core.sizes import check_memory, misfit
from a2d_mpi.core.wire import FORMATS

PHASES = ("forward", "backward")
DISTRIBUTIONS = ("contiguous", "zigzag", "striped", "triangle", "balanced")  # a2d_mpi.sharding
# Beyond these the pairs of a sequence, and the bytes of a tensor, are no 64-bit integers.
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
    """Sizes, dtype and scale of one sequence's attention, on however many ranks.

    Tensors are named ``q k v out lse dout dlse delta dq dk dv``.

    Parameters
    ----------
    seqlen : int
        N, tokens of the whole sequence.
    nheads, headdim : int
        H query heads of D elements.
    nheads_kv : int, optional
        KV heads, a divisor of nheads.  Default: nheads.
    dtype : {"float32", "float64", "float16", "bfloat16"} or dtype
        Of all tensors but lse, dlse and delta; kept by its name.
    softmax_scale : float, optional
        Default: ``1 / sqrt(headdim)``.
    seqlen_kv : int, optional
        Tokens of k and v, of another sequence in cross-attention.  Default: seqlen.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  Default: they stay as they are.
    headdim_v : int, optional
        Elements of a head of v, out and their gradients.  Default: headdim.
    wire : str, optional
        One of `a2d_mpi.core.wire.FORMATS`, in which tensors travel that it makes smaller.
        Default: tensors travel as they are.

    Raises
    ------
    ValueError
        If a value is not of these, too large, or not finite.
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
            checked[name] = _size(name, value, most)
        if checked["nheads"] % checked["nheads_kv"]:
            raise ValueError(
                f"nheads_kv must divide nheads, got {self.nheads_kv} and {self.nheads}"
            )
        checked["dtype"] = as_dtype(self.dtype).name
        scale = self.softmax_scale
        checked["softmax_scale"] = 1 / math.sqrt(self.headdim) if scale is None else float(scale)
        if not math.isfinite(checked["softmax_scale"]):
            raise ValueError(f"softmax_scale must be finite, got {scale!r}")
        cap = self.logit_softcap
        if self.wire not in (None, *FORMATS):
            raise ValueError(f"wire must be None or one of {tuple(FORMATS)}, got {self.wire!r}")
        checked["logit_softcap"] = None if cap is None else float(cap)
        if cap is not None and not 1e-30 <= checked["logit_softcap"] <= 1e30:
            raise ValueError(f"logit_softcap must be between 1e-30 and 1e30, got {cap!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def arguments(self) -> dict[str, object]:
        """The parameters by name, as keyword arguments of a plan."""
        return {x.name: getattr(self, x.name) for x in fields(AttentionConfig)}

    @cached_property
    def compute_dtype(self) -> np.dtype:
        """Dtype of lse, delta, products and sums: float32 or float64."""
        return compute_dtype(DTYPES[self.dtype])

    @property
    def mixed_precision(self) -> bool:
        """True if tensors are narrower than the dtype of the computation."""
        return DTYPES[self.dtype].itemsize < self.compute_dtype.itemsize

    def dtype_of(self, name: str, accumulated: bool = False) -> np.dtype:
        """Dtype of a tensor as the caller has it or, if `accumulated`, as it is computed."""
        return self.compute_dtype if accumulated or name in _STATISTICS else DTYPES[self.dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one token of a tensor: (heads, its width), of lse, dlse and delta (heads,)."""
        heads = self.nheads_kv if name in OF_KEYS else self.nheads
        width = self.headdim_v if name in _OF_VALUES else self.headdim
        return (heads,) if name in _STATISTICS else (heads, width)

    def nbytes(self, name: str, accumulated: bool = False, wire: bool = False) -> int:
        """Bytes of one token of a tensor; arguments as of `row`."""
        shape, dtype = self.row(name, accumulated, wire)
        return math.prod(shape) * dtype.itemsize

    def row(
        self, name: str, accumulated: bool = False, wire: bool = False
    ) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of one token of a tensor.

        With `wire` as it travels: encoded, (heads, bytes) uint8.  Statistics, and tensors that the
        format would not make smaller, travel as they are.  `accumulated` as of `dtype_of`.
        """
        shape, dtype = self.shape(name), self.dtype_of(name, accumulated)
        if wire and self.wire and name not in _STATISTICS:
            heads, elements = shape
            width = FORMATS[self.wire].width(elements)
            if width < elements * dtype.itemsize:
                return (heads, width), np.dtype(np.uint8)
        return shape, dtype

    def rounds(self, name: str, accumulated: bool = False) -> bool:
        """Whether a tensor travels encoded; `accumulated` as of `dtype_of`."""
        return self.row(name, accumulated, wire=True) != self.row(name, accumulated)

    def cp_group(self, heads: int) -> AttentionConfig:
        """The config of one context-parallel group, which has 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        why = misfit(self.nheads, self.nheads_kv, heads)
        if why:
            raise ValueError(why)
        return replace(
            self, nheads=self.nheads // heads, nheads_kv=max(1, self.nheads_kv // heads)
        )

    def check_room(self, ranks: int) -> None:
        """Refuse a problem that cannot fit, before any code walks over all tokens.

        Raises
        ------
        ValueError
            If q, k and v of a rank, at most a third of its need, fill the memory of its node.
        """
        nbytes = -(-self.seqlen // ranks) * sum(map(self.nbytes, "qkv"))
        check_memory(f"{self.seqlen} tokens on {ranks} ranks: q, k and v of one", nbytes)


def _size(name: str, value: object, most: int) -> int:
    """A size, if it is a whole number from 1 to `most`; ValueError otherwise."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > most:
        digits = int(value).bit_length() * math.log10(2)
        shown = value if digits < 30 else f"one of {digits:.0f} digits"
        raise ValueError(f"{name} must be at most {most}, got {shown}")
    return int(value)
