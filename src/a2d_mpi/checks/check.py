"""Checks of a distributed run against float64, on its own ranks and without any N x N matrix.

The reference, `a2d_mpi.onepage`, shares no code with the algorithms.  Each rank computes dense
attention of chosen queries of all ranks over its own keys, in float64, and of its own queries over
chosen keys.  The same computation is repeated in the precision of the run.
The bound of the run's error is twice the error of this second computation, plus a rounding term.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from mpi4py import MPI

from a2d_mpi import onepage
from a2d_mpi.attention.device_state import ROUNDED
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core.dtypes import compute_dtype

ROWS = 64  # rows that are checked together
RESULTS = ("out", "dq", "dk", "dv")  # partial results of which travel in the format of `wire`


@dataclass(frozen=True)
class Check:
    """The check of one tensor.

    Attributes
    ----------
    error : float
        Largest error.  With a narrow format on the wire, the largest distance from attention of
        the rounded tensors.
    bound : float
        Largest allowed error; NaN if rounding alone may change the values by a tenth.
    rows : int
        Number of compared tokens; of "repeat", "inputs" and "traffic" the number of ranks.
    as_given : float or None
        With a narrow format on the wire, the largest distance from attention of the tensors before
        rounding.
    """

    error: float
    bound: float
    rows: int
    as_given: float | None = None

    @property
    def attributes(self) -> dict[str, object]:
        """The fields without None, and the verdict: attributes in result files."""
        values = {name: x for name, x in vars(self).items() if x is not None}
        return {**values, "passed": self.passed}

    @property
    def passed(self) -> bool:
        """True if tokens were compared, and the error is at most the bound."""
        return self.verdict == "passed"

    @property
    def verdict(self) -> str:
        """The verdict in words: "passed", or "FAILED" with the reason if it is not the error."""
        if self.rows <= 0:
            return "FAILED: nothing was compared"
        if not math.isfinite(self.error):
            return "FAILED: not finite"
        if not math.isfinite(self.bound):
            return "FAILED: not checked, rounding alone may change a tenth of it"
        return "passed" if self.error <= self.bound else "FAILED"


def attributes_of(checks: Mapping[str, Check]) -> dict[str, object]:
    """Return the checks of a run as they stand in files, and whether all passed."""
    return {
        "passed": all(x.passed for x in checks.values()),
        "checks": {name: x.attributes for name, x in checks.items()},
    }


@np.errstate(all="ignore")  # overflows show in the results and fail the check
def check_attention(
    plan: AttentionPlan, tensors: Mapping[str, np.ndarray], rows: int | None = None, seed: int = 0
) -> dict[str, Check]:
    """Check out and lse, and the gradients if they are given, against float64.

    Collective over the plan's ranks.

    Parameters
    ----------
    plan : AttentionPlan
    tensors : mapping of str to arrays
        This rank's shards of q, k, v, out, lse, and for the gradients dout, dq, dk, dv.
    rows : int, optional
        Number of sampled query rows (out, lse, dq) and, independently, of sampled key rows (dk,
        dv).  Default: all rows.  The first and the last token are always among them.
    seed : int
        Seed of the sample, the same on all ranks.

    Returns
    -------
    dict of str to Check
        By tensor, the same on all ranks: the largest error of a checked element and its bound.
        The error is infinite if a value or the reference is not finite.  The bound is NaN if
        there is none.  For a plan with `wire`, the checks also have the errors against the tensors
        before rounding, except for dk and dv of a sample.

    Notes
    -----
    out, lse and dq of a checked row are compared with exact values.  A row of dk or dv depends on
    lse and delta of *every* query.  If all rows are checked, these are exact, too.  In a sample
    they are taken from the run (delta from its out).  The sampled query rows check them: an error
    of lse is a relative error of all probabilities, and the bound of lse is at most 0.1.

    A plan with `wire` is compared with exact values of tensors that were rounded to this format by
    `core.wire.rounded`, which shares no code with the plan.  Its gradients are compared with exact
    gradients at its own out.  So the bounds need no term for the rounding of q, k, v and dout.
    The rounding of partial results adds an a-priori term: see `error_bounds`.
    """
    comm, local, wire, merging = plan.grid.comm, dict(tensors), plan.config.wire, {}
    as_given: dict[str, float] = {}
    if wire:
        from a2d_mpi.core.wire import FORMATS, rounded

        sampled = rows is not None and rows < plan.seqlen
        for name, where, value in _reference(plan, local, rows, seed):
            if not (sampled and name in ("dk", "dv")):
                error = distance(local[name][where].astype(np.float64), value)
                as_given[name] = max(error, as_given.get(name, 0.0))
        sent = [x for x in ROUNDED if x in local and plan.config.rounds(x)]
        local |= {x: rounded(local[x], wire) for x in sent}
        merges = plan.layout.positions - 1 + (plan.layout.heads > 1)
        share = merges * (FORMATS[wire].error + FORMATS[wire].floor)
        merging = {x: share * plan.config.rounds(x, accumulated=True) for x in RESULTS}
    exact = _reference(plan, local, rows, seed, at_own_out=bool(wire))
    if plan.compute_dtype == np.float64:
        both = ((x, x) for x in exact)
    else:
        both = zip(exact, _reference(plan, local, rows, seed, plan.compute_dtype, bool(wire)))
    seen: dict[str, list[float]] = {}  # by tensor: maxima over this rank's rows, number of rows
    for (name, where, value), (_, _, plain) in both:
        computed, finite = local[name][where].astype(np.float64), np.isfinite(value)
        # Only lse may be infinite: -inf for a masked row.
        comparable = (finite | np.isneginf(value) if name == "lse" else finite).all()
        error = distance(computed, value) if comparable else math.inf
        new = error, distance(plain, value), float(np.abs(value[finite]).max(initial=0))
        *before, number = seen.get(name, (0.0, 0.0, 0.0, 0))
        seen[name] = [*map(max, before, new), number + len(computed)]
    of_ranks = comm.allgather((seen, as_given))
    errors, same_precision, largest = (
        {x: max(found[x][i] for found, _ in of_ranks) for x in seen} for i in range(3)
    )
    checked = {x: sum(found[x][3] for found, _ in of_ranks) for x in seen}
    as_given = {x: max(given[x] for _, given in of_ranks) for x in as_given}
    sizes = plan.dtype, plan.softmax_scale, _norms(comm, local), largest, same_precision
    bounds = error_bounds(*sizes, merging)
    return {x: Check(errors[x], bounds[x], checked[x], as_given.get(x)) for x in errors}


def _reference(
    plan: AttentionPlan,
    local: Mapping[str, np.ndarray],
    rows: int | None,
    seed: int,
    kind: np.typing.DTypeLike = np.float64,
    at_own_out: bool = False,
) -> Iterator[tuple[str, np.ndarray | slice, np.ndarray]]:
    """Compute dense attention in one precision, some rows after the others.  Collective.

    It is `a2d_mpi.onepage` on a grid of one row of all ranks for a sample of the queries, and of
    one column for a sample of the keys.  With `at_own_out`, gradients are computed at the run's
    own out.

    Yields
    ------
    name : str
        Name of a tensor.
    where : indices
        Rows of this rank's shard.
    value : array
        Expected values of these rows, rounded to the run's dtype; not rounded in float64.
    """
    comm, backward = plan.grid.comm, "dq" in local
    double, mask = kind == np.float64, plan.mask
    options = {
        "softmax_scale": plan.softmax_scale,
        "dtype": np.dtype(kind),
        # The run's kernel rounds the factors of products, the float64 reference does not.
        "products": None if double else plan.product_dtype,
        "logit_softcap": plan.logit_softcap,
    }
    alone = _Alone()

    def stored(x: np.ndarray) -> np.ndarray:
        return x if double else x.astype(plan.dtype).astype(kind)

    names = ("q", "k", "v", "dout", "out", "lse")[: None if backward else 3]
    q, k, v, *given = (local[x].astype(kind) for x in names)
    if backward:  # values of the run; if all rows are checked, exact values replace them
        dout, out, lse = given
    for sample in samples(plan.seqlen, rows, seed):
        own, where = _own(plan, sample)
        # One row of all ranks: comm is its row, each rank a column; queries, keys.
        of_row = comm, alone, own, plan.tokens
        out_rows, lse_rows = onepage.forward(*of_row, q[where], k, v, mask, **options)
        out_rows = stored(out_rows)
        yield "out", where, out_rows
        yield "lse", where, lse_rows
        if backward:
            at = out[where] if at_own_out else out_rows
            given, last = (dout[where], q[where]), (at, lse_rows, mask)
            dq, _, _ = onepage.backward(*of_row, *given, k, v, *last, **options)
            yield "dq", where, stored(dq)
            if rows is None or rows >= plan.seqlen:
                out[where], lse[where] = at, lse_rows
    if not backward:
        return
    for sample in samples(plan.seqlen, rows, seed + 1):
        own, where = _own(plan, sample)
        keys = k[where], v[where]
        given = dout, q, *keys, out, lse, mask
        _, dk, dv = onepage.backward(alone, comm, plan.tokens, own, *given, **options)
        yield "dk", where, stored(dk)
        yield "dv", where, stored(dv)


class _Alone:
    """A line of one rank, which copies nothing."""

    def allgather(self, x: object) -> list:
        return [x]

    def alltoall(self, x: list) -> list:
        return x


def _own(plan: AttentionPlan, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a sample that this rank owns, and their rows in its shard."""
    own = np.intersect1d(sample, plan.tokens, assume_unique=True)
    return own, np.searchsorted(plan.tokens, own)


def _norms(comm: MPI.Intracomm, local: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compute the norms that `error_bounds` takes."""
    names = [name for name in ("q", "k", "v", "dout") if name in local]
    return {name: comm.allreduce(_largest_norm(local[name]), op=MPI.MAX) for name in names}


def error_bounds(
    dtype: np.dtype,
    softmax_scale: float,
    norms: Mapping[str, float],
    largest: Mapping[str, float],
    same_precision: Mapping[str, float],
    merging: Mapping[str, float] = {},
) -> dict[str, float]:
    """Return the largest error that each result may have.

    The bound is ``2 same_precision + eps ((2 + L) largest + T)``:

    * eps is the machine epsilon of the computation.
    * L is the largest absolute lse.  It stands for the size of logits.  The rounding of a logit is
      a relative error of its exponential, and an absolute error of lse.
    * T bounds the terms of a result before they cancel, by Cauchy-Schwarz; of lse, of a logit.
    * In float64 there is no second computation, and the first term is ``1e-12 (largest + T)``.
      It is that large because T bounds the terms of one token, and thousands of roundings add up.
    * 16-bit results get another quarter of their eps times `largest`, which is half a rounding.
      The bound of out is at least eps times `largest`: a partial out is rounded, and so is out.
      With few elements, the plain computation may be much closer by luck.

    A bound is NaN, and then no result passes, if it is not finite or proves nothing.  It proves
    nothing if it exceeds both of two numbers.  The first one is a tenth of `largest` (0.1 for lse,
    whose error is a relative error of probabilities).  The second number is half of the digits of
    the terms.  It is for values that cancel, for example dq and dk of queries that see a single
    key: they can only be shown to be small beside their terms.

    Parameters
    ----------
    dtype : dtype
        Dtype of the tensors of the run.
    softmax_scale : float
    norms : mapping of str to float
        Largest Euclidean norm of a (token, head) row of q, k, v and, for gradients, dout.
    largest : mapping of str to float
        Largest absolute value of the float64 reference, by result (out, lse, dq, dk, dv).
    same_precision : mapping of str to float
        Largest error, by result, of the plain dense computation (in float32 for 16-bit tensors)
        whose results are rounded to `dtype`.
    merging : mapping of str to float, optional
        With a narrow format on the wire, the number of merges times the error of the format, by
        result.  Times the largest term it is added to the bound, which may then be large.

    Returns
    -------
    dict of str to float
        Bounds of absolute errors, by result.
    """
    dp = abs(softmax_scale) * norms["v"] * norms.get("dout", 0.0)
    terms = {
        "lse": abs(softmax_scale) * norms["q"] * norms["k"],
        "out": norms["v"],
        "dq": dp * norms["k"],
        "dk": dp * norms["q"],
        "dv": norms.get("dout", 0.0),
    }
    eps = float(np.finfo(compute_dtype(dtype)).eps)
    half_of_digits = math.sqrt(ml_dtypes.finfo(dtype).eps)
    bounds = {}
    for name, value in largest.items():
        size = 1.0 if name == "lse" else value
        term = terms.get(name, 0.0)
        double = dtype == np.float64
        first = 1e-12 * (value + term) if double else 2 * same_precision[name]
        bound = first + eps * ((2 + largest["lse"]) * size + term)
        if dtype.itemsize == 2 and name != "lse":
            rounding = float(ml_dtypes.finfo(dtype).eps) * size
            bound = max(bound + rounding / 4, rounding * (name == "out"))
        least = size / 10
        if merging.get(name):
            bound, least = bound + merging[name] * max(term, size), math.inf
        if name != "lse":  # it is no sum of its terms, which are those of a logit
            least = max(least, half_of_digits * term)
        proves = math.isfinite(bound) and bound <= least
        bounds[name] = bound if proves else math.nan
    return bounds


def worse(a: Check, b: Check) -> Check:
    """Choose the check of a tensor to report: a failed one, or the one nearer to its bound.

    It gets the larger of both errors against the tensors before rounding.
    """
    as_given = max((x.as_given for x in (a, b) if x.as_given is not None), default=None)
    if a.passed and b.passed:
        chosen = a if a.error * b.bound >= b.error * a.bound else b
    else:
        chosen = b if a.passed else a
    return replace(chosen, as_given=as_given)


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return a hash of the bits of each tensor."""
    return {
        # As bytes, because Python's buffers have no bfloat16.
        name: hashlib.blake2b(np.ascontiguousarray(x).reshape(-1).view(np.uint8)).digest()
        for name, x in tensors.items()
    }


def _largest_norm(x: np.ndarray) -> float:
    norms = np.linalg.norm(x.astype(np.float64), axis=-1)
    return float(np.nan_to_num(norms, nan=math.inf, posinf=math.inf).max(initial=0))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest |a - b|.  Equal infinities have distance 0, NaN has distance inf."""
    distance = np.where(a == b, 0, np.abs(a - b))
    return float(np.nan_to_num(distance, nan=math.inf, posinf=math.inf).max(initial=0))


def samples(seqlen: int, rows: int | None, seed: int) -> list[np.ndarray]:
    """Return the tokens to check, sorted and cut into arrays: all, or a sample with both ends."""
    tokens = np.arange(seqlen)
    if rows is not None and rows < seqlen:
        chosen = np.random.default_rng(seed).choice(seqlen, rows, replace=False)
        tokens = np.union1d(chosen, [0, seqlen - 1])
    return np.array_split(tokens, -(-len(tokens) // ROWS))
