"""Random problems and their dense float64 solution.

A mask is drawn twice: as intervals, for the package, and as a rule for a query i and a key j, for
the solution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from dense import TENSORS, errors_of, plain, products_of
from oracles import Intervals

from a2d_mpi import Causal, Documents, Full, IntervalMask, Mask, PrefixLM, SlidingWindow
from a2d_mpi.core import reference
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.core.sizes import misfit
from a2d_mpi.core.wire import FORMATS, rounded
from a2d_mpi.sharding import triangle_shards

METHODS = (
    "attention2d", "attention2d", "node aware", "triangle",
    "ring", "striped ring", "double ring",
)  # fmt: skip
CROSS = ("attention2d", "node aware", "ring", "double ring")  # for two sequences
LISTS = ("documents", "causal documents", "prefix", "sink")  # masks of one sequence
MASKS = (
    "full", "causal", "anti-causal", "window", "documents", "causal documents", "prefix",
    "random", "beyond", "some empty", "hidden", "sink", "several",
)  # fmt: skip
PRIMES = (2, 3, 5, 7, 11, 13, 31, 53, 89, 97, 127, 149)
FAR = 2**62
AGAIN = ("none", "the same", "fresh", "fresh after free")
# Orders of summation, of which the largest error counts: one draw of it may be anything.  Of huge
# logits few terms count, those that tie or, under a soft-cap, cancel: draws differ more.
ORDERS, ORDERS_HUGE = 4, 32


@dataclass
class Case:
    """A problem, and the options with which it is solved."""

    seed: int
    method: str
    shape: tuple[int, int, int]
    order: str
    mask: Mask = field(repr=False)
    seen: np.ndarray = field(repr=False)  # (seqlen, seqlen_kv) bool
    mask_name: str
    sizes: dict[str, int]
    dtype: np.dtype
    options: dict[str, object]  # of the plan
    backward: bool
    blocks: tuple[int, int, int, int]  # rows, keys, alignment of the kernel; grain of messages
    values: str
    nodes: tuple[int, ...]
    refilled: bool  # both data sets are given in the same arrays, one after the other
    in_turn: bool  # both forward calls, then both backward calls
    again: str  # the plan that repeats the results: one of AGAIN

    def inputs(self, data: int = 0) -> list[np.ndarray]:
        """Return q, k, v and dout of whole sequences, of one of two data sets.

        Rows that nobody sees are NaN, or large.
        """
        rng = np.random.default_rng([self.seed, 1 + 2 * data])
        (n, m), d = self.seen.shape, self.sizes["headdim"]
        shapes = (n, self.sizes["nheads"]), (m, self.sizes["nheads_kv"])
        found = [rng.standard_normal((*shapes[x], d)) for x in (0, 1, 1, 0)]
        if self.values == "sparse":
            found = [x * (rng.random(x.shape) < 0.1) for x in found]
        elif self.values == "large":
            for x, size in zip(found, (10, 1, 100, 30)):
                x *= size
        elif self.values == "padded":
            masked, unseen = ~self.seen.any(axis=1), ~self.seen.any(axis=0)
            for x, hidden in zip(found, (masked, unseen, unseen, masked)):
                x[hidden] = rng.choice([np.nan, np.inf, 1e4])
        return [x.astype(self.dtype) for x in found]

    def rounded(self, whole: list[np.ndarray]) -> list[np.ndarray]:
        """Return inputs without padding, rounded to the format of the wire if there is one."""
        masked, unseen = ~self.seen.any(axis=1), ~self.seen.any(axis=0)
        for x, hidden in zip(whole, (masked, unseen, unseen, masked)):
            x[hidden] = 0  # padding may hold anything
        if not (wire := self.options.get("wire")):
            return whole
        config = AttentionConfig(**self.sizes, dtype=self.dtype, wire=wire)
        return [
            rounded(x, wire) if config.rounds(name) else x
            for name, x in zip(("q", "k", "v", "dout"), whole)
        ]


def draw(seed: int, ranks: int, wire: str | None = None, only: str | None = None) -> Case:
    """Draw the case of a seed; it is the same on every machine.

    `wire`: format of messages, of one sequence; "any": one of them.  `only`: the dtype.
    """
    rng = np.random.default_rng([seed, ranks])

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    divisors = [x for x in range(1, ranks + 1) if ranks % x == 0]
    shape = pick(*((r, c, ranks // r // c) for r in divisors for c in divisors
                   if ranks % (r * c) == 0))  # fmt: skip
    cells = shape[0] * shape[1]
    method = pick(*(x for x in METHODS if x != "triangle" or triangle_shards.fits(cells)))
    dtype = pick("float32", "float32", "float64", "float16", "bfloat16")
    dtype = only or dtype
    nheads = shape[2] * pick(1, 1, 2, 3, 4 if shape[2] < 4 else 1)
    nheads_kv = pick(*(x for x in range(1, nheads + 1)
                       if nheads % x == 0 and not misfit(nheads, x, shape[2])))  # fmt: skip
    seqlen = int(pick(rng.integers(1, ranks + 2), pick(*PRIMES), *rng.integers(1, 151, 3)))
    headdim = pick(1, 2, 3, 5, 8, 8, 16, 17, 32, 33, 64)
    options = {
        "distribution": pick(None, "contiguous", "zigzag", "striped", "balanced"),
        "overlap": pick(True, True, False),
        "kernel": pick("auto", "numpy"),
        "softmax_scale": pick(None, None, None, None, float(rng.standard_normal()), -0.2, 1e-3),
    }
    own_kv = max(1, nheads_kv // shape[2])
    fit = [x for x in range(1, own_kv + 1) if own_kv % x == 0]
    cuts = np.random.default_rng([seed, ranks, 2])  # other draws do not depend on slices
    options["slices"] = tuple(int(cuts.choice(fit)) for _ in range(2))
    if wire:
        options["wire"] = tuple(FORMATS)[seed % len(FORMATS)] if wire == "any" else wire
    if method in CROSS and rng.random() < 0.2 and not wire:
        lengths = {"seqlen_kv": int(pick(1, *rng.integers(1, 151, 3)))}
        of_keys = pick(None, "contiguous", "zigzag", "striped")
        options["distribution"] = options["distribution"], of_keys
    else:
        lengths = {}
    if rng.random() < 0.2:
        options["logit_softcap"] = pick(0.5, 5.0, 50.0)
    # Logits of 1e4: float16 has no room for their gradients.
    if dtype != "float16" and rng.random() < 0.1:
        options["softmax_scale"] = pick(1, -1) * 3e3 / headdim**0.5
    elif rng.random() < 0.02:
        options["softmax_scale"] = 0.0
    if method in ("striped ring", "triangle"):
        del options["distribution"]
    name = "causal" if method == "triangle" else pick(*MASKS)
    if lengths and name in LISTS:
        name = "random"
    mask, seen = _mask(name, seqlen, lengths.get("seqlen_kv", seqlen), rng)
    sizes = {"seqlen": seqlen, "nheads": nheads, "nheads_kv": nheads_kv, "headdim": headdim}
    sizes |= lengths
    huge = dtype == "float16" or abs(options["softmax_scale"] or 0) > 100
    return Case(
        seed=seed,
        method=method,
        shape=shape,
        order=pick("rcu", "ruc", "cru", "cur", "urc", "ucr"),
        mask=mask,
        seen=seen,
        mask_name=name,
        sizes=sizes,
        dtype=DTYPES[dtype],
        options=options,
        backward=rng.random() < 0.75,
        blocks=(pick(512, 512, 64, 16, 5), pick(512, 512, 64, 7), pick(32, 32, 4, 1),
                pick(128, 4, 1)),
        values=pick("normal", "normal", "sparse", "padded", "padded", *["large"] * (not huge)),
        nodes=tuple(rng.integers(1 + rng.integers(ranks), size=ranks).tolist()),
        refilled=rng.random() < 0.5,
        in_turn=rng.random() < 0.3,
        again=pick(*AGAIN),
    )  # fmt: skip


def _mask(name: str, n: int, m: int, rng: np.random.Generator) -> tuple[Mask, np.ndarray]:
    """Return a mask, and whether query i of n sees key j of m, as a matrix.

    The same kinds come as arrays, and for sequences of odd length as masks of their own classes.
    """
    tokens, last = np.arange(n), np.arange(n) + m - n
    zero, i, j = 0 * tokens, tokens[:, None], np.arange(m)[None, :]
    if name == "full":
        return Full(), np.ones((n, m), bool)
    if name == "causal":
        return Causal(), j <= last[:, None]
    if name == "anti-causal":
        return IntervalMask(tokens, zero + m), j >= i
    if name == "window":  # begins before the first key, ends beyond the last
        a, b = rng.integers(0, n + 1, 2)
        mask = SlidingWindow(a, b) if n % 2 else IntervalMask(last - a, last + b + 1)
        return mask, (last[:, None] - j <= a) & (j - last[:, None] <= b)
    if name.endswith("documents"):
        document = np.cumsum(rng.random(n) < rng.choice([0.02, 0.1, 0.5]))
        first = np.array([np.flatnonzero(document == x)[0] for x in document])
        last = np.array([np.flatnonzero(document == x)[-1] for x in document])
        same = document[:, None] == document[None, :]
        causal = name != "documents"
        mask = IntervalMask(first, tokens + 1 if causal else last + 1)
        if n % 2:
            mask = Documents(np.append(np.unique(first), n), causal)
        return mask, same & (j <= i) if causal else same
    if name == "prefix":
        prefix = rng.integers(0, n + 1)
        mask = IntervalMask(zero, np.maximum(tokens + 1, prefix))
        return PrefixLM(prefix) if n % 2 else mask, (j < prefix) | (j <= i)
    if name in ("random", "beyond", "some empty"):
        slack = 5 if name == "beyond" else 0
        begin, end = np.sort(rng.integers(-slack, m + 1 + slack, (2, n)), axis=0)
        if name == "beyond":
            begin[rng.random(n) < 0.2], end[rng.random(n) < 0.2] = -FAR, FAR
        elif name == "some empty":  # the wrong way round
            empty = rng.random(n) < rng.random()
            begin[empty], end[empty] = end[empty] + rng.integers(0, 3), begin[empty]
        return IntervalMask(begin, end), (j >= begin[:, None]) & (j < end[:, None])
    if name == "hidden":
        begin = rng.integers(-3, m + 3, n)
        return IntervalMask(begin, begin - rng.integers(0, 4, n)), np.zeros((n, m), bool)
    if name == "sink":
        sink, window = rng.integers(0, n + 1, 2)
        first = np.maximum(tokens - window, 0)
        pairs = [(zero, np.minimum(sink, first)), (first, tokens + 1)]
        seen = (j <= i) & ((j < sink) | (i - j <= window))
        return Intervals(*pairs[:: rng.choice([1, -1])]), seen
    points = np.sort(rng.integers(0, m + 1, (2 * rng.integers(2, 5), n)), axis=0)
    pairs = [tuple(points[x : x + 2]) for x in range(0, len(points), 2)]
    seen = (points[:, :, None] <= j).sum(axis=0) % 2 == 1  # inside after an odd number of points
    return Intervals(*(pairs[x] for x in rng.permutation(len(pairs)))), seen


def solve(
    case: Case, data: int, out: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, float], list[np.ndarray]]:
    """Return exact results, the errors of plain ones in the precision, and clean inputs.

    `data`: which of the two data sets.  `out`: the one that was found.  Gradients of 16-bit
    tensors, or with a format of the wire, are those at this out, which is judged itself: of few
    tokens, its rounding may be all that is wrong with them, and by how much is a matter of luck.
    """
    whole = case.rounded(case.inputs(data))
    if case.dtype.itemsize > 2 and "wire" not in case.options:
        out = None
    scale, cap = case.options["softmax_scale"], case.options.get("logit_softcap")
    scale = case.sizes["headdim"] ** -0.5 if scale is None else scale
    given = whole, case.seen, scale, cap
    exact = plain(*given, at=out)
    exact = {x: exact[x] for x in (TENSORS[:5] if case.backward else TENSORS[:2])}
    errors = dict.fromkeys(exact, 0.0)
    if case.dtype == np.float64:
        return exact, errors, whole
    rng, precision = np.random.default_rng([case.seed, 2]), compute_dtype(case.dtype)
    scaled = [(whole[0] * scale).astype(precision), *whole[1:]]
    products = products_of(case.dtype)
    # Kernels scale q, and the textbook the product: so half of the orders do this, and half that.
    for order in range(ORDERS_HUGE if abs(scale) > 100 else ORDERS):
        given = (scaled, case.seen, 1.0, cap) if order % 2 else (whole, case.seen, scale, cap)
        same = plain(*given, dtype=precision, kept=case.dtype, at=out, rng=rng, products=products)
        same["dq"] *= scale if order % 2 else 1
        errors = {x: max(errors[x], y) for x, y in errors_of(same, exact, case.dtype).items()}
    of_out, *of_gradients = _sizes(case, whole, scale, cap, exact["lse"])
    if case.backward:  # what rounding leaves of terms that cancel
        for x, size in zip(("dq", "dk"), of_gradients):
            errors[x] = max(errors[x], float(np.finfo(precision).eps) / 2 * size)
    if case.dtype.itemsize == 2:  # partial outs travel rounded, and may be larger than their mean
        rounding = float(ml_dtypes.finfo(case.dtype).eps) / 4
        errors["out"] = max(errors["out"], rounding * of_out)
    return exact, errors, whole


def _sizes(
    case: Case, whole: list[np.ndarray], scale: float, cap: float | None, lse: np.ndarray
) -> Iterator[float]:
    """Return the largest sums of the sizes of the terms of out, dq and dk."""
    q, k, v, dout = (x.astype(float) for x in whole)
    out, _ = reference.attention(q, k, abs(v), case.seen, scale, logit_softcap=cap)
    # More columns, which do not change the logits.
    columns = np.concatenate([q, 0 * q, abs(q)], 2), np.concatenate([k, abs(k), 0 * k], 2)
    given = abs(dout), *columns, abs(v), lse, np.zeros_like(lse), case.seen, scale
    dq, dk, _ = reference.attention_backward(*given, logit_softcap=cap)
    d = q.shape[2]
    return (abs(x).max(initial=0) for x in (out, dq[..., d : 2 * d], dk[..., 2 * d :]))
