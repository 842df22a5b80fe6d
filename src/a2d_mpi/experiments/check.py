"""Checks of a distributed run against float64, on its own ranks, without an N x N matrix anywhere.

The reference shares nothing with the algorithms: chosen query rows go to all ranks, each computes
their dense attention over the keys that it owns in float64, and plain sums over all ranks give
out, lse and dq.  The same is done once more in the precision of the run: twice the error of that
plain computation, plus a term for rounding the inputs' products, bounds the error of the run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.experiments.results import Check

BLOCK = 64  # rows that are checked at a time


@np.errstate(all="ignore")  # what overflows is found in the results, and fails
def check_attention(
    plan: AttentionPlan, tensors: Mapping[str, np.ndarray], rows: int | None = None, seed: int = 0
) -> dict[str, Check]:
    """Check out and lse, and the gradients if they are given, against float64.

    Collective over the plan's ranks.

    Parameters
    ----------
    plan : AttentionPlan
    tensors : mapping of str to arrays
        This rank's shards of q, k, v, out, lse; for the gradients also dout, dq, dk, dv.  With a
        sink also "sink" and, for its gradient, "dsink", the share of this rank.
    rows : int, optional
        Number of sampled query rows (out, lse, dq) and, independently, of sampled key rows (dk,
        dv).  Default: all rows.  The first and the last token are always among them.
    seed : int
        Of the sample, the same on all ranks.

    Returns
    -------
    dict of str to Check
        By tensor, the same on all ranks: the largest error of a checked element, infinite where
        a value or the reference is not finite, and its bound, NaN where there is none.

    Notes
    -----
    out, lse and dq of a checked row are compared with exact values.  A row of dk or dv depends on
    lse and delta of *every* query.  With all rows checked these are exact too; in a sample they
    are the run's own (delta from its out), which the sampled query rows vouch for: an error of
    lse is a relative one of all probabilities, and lse has no bound beyond a tenth of a nat.
    """
    comm = plan.grid.comm
    local = dict(tensors)
    errors = _Errors(comm, plan, local)
    sampled = rows is not None and rows < plan.seqlen
    ran_backward, sink = "dq" in local, local.get("sink")
    # The reference, and the plain computation in the run's precision, if that is another; a list:
    # all ranks must go through it in the same order.
    kinds = list(dict.fromkeys((np.dtype(np.float64), plan.compute_dtype)))
    options = {
        kind: {
            "softmax_scale": plan.softmax_scale,
            "dtype": kind,
            # The run's kernel rounds factors, the reference does not.
            "products": None if kind == np.float64 else plan.product_dtype,
            "logit_softcap": plan.logit_softcap,
        }
        for kind in kinds
    }

    def stored(x: np.ndarray, kind: np.dtype) -> np.ndarray:
        """A result as the run's dtype keeps it; exact ones are kept in float64."""
        return x if kind == np.float64 else x.astype(plan.dtype).astype(kind)

    k, v = local["k"], local["v"]
    # Gradients of this rank's keys, complete once all query rows have passed.
    dk, dv = ({kind: np.zeros(k.shape, kind) for kind in kinds} for _ in "kv")
    dsink = dict.fromkeys(kinds, 0.0)  # of all tokens, on every rank
    for tokens in _blocks(plan.seqlen, rows, seed):
        own, order, q_rows, *dout_rows = _share(plan, tokens, local, "q", "dout")
        visible = plan.mask.dense(tokens[order], plan.tokens)
        results = {}
        for kind in kinds:
            out, lse = reference.attention(q_rows, k, v, visible, **options[kind])
            out, lse = _merge(comm, out, lse, sink)
            out = stored(out, kind)
            results[kind] = {"out": out, "lse": lse}
            if ran_backward:
                delta = (np.asarray(dout_rows[0], kind) * out).sum(axis=-1)
                dq, dk_rows, dv_rows = reference.attention_backward(
                    dout_rows[0], q_rows, k, v, lse, delta, visible, **options[kind]
                )
                results[kind]["dq"] = stored(_sum(comm, dq), kind)
                dk[kind] += dk_rows
                dv[kind] += dv_rows
                if sink is not None and not sampled:
                    dsink[kind] += reference.sink_gradient(lse, delta, sink, kind)
        where = np.searchsorted(plan.tokens, tokens[order][own])
        for name in results[plan.compute_dtype]:
            values = {kind: results[kind][name][own] for kind in kinds}
            errors.add(name, local[name][where], values)
    if ran_backward and not sampled:
        for name, values in (("dk", dk), ("dv", dv)):
            errors.add(name, local[name], {kind: stored(x, kind) for kind, x in values.items()})
    elif ran_backward:
        dout, q, lse = local["dout"], local["q"], local["lse"]
        delta = (dout.astype(np.float64) * local["out"]).sum(axis=-1)
        for tokens in _blocks(plan.seqlen, rows, seed + 1):
            own, order, k_rows, v_rows = _share(plan, tokens, local, "k", "v")
            visible = plan.mask.dense(plan.tokens, tokens[order])
            values: dict[str, dict] = {"dk": {}, "dv": {}}
            for kind in kinds:
                _, dk_rows, dv_rows = reference.attention_backward(
                    dout, q, k_rows, v_rows, lse, delta, visible, **options[kind]
                )
                for name, x in (("dk", dk_rows), ("dv", dv_rows)):
                    values[name][kind] = stored(_sum(comm, x)[own], kind)
            where = np.searchsorted(plan.tokens, tokens[order][own])
            for name in ("dk", "dv"):
                errors.add(name, local[name][where], values[name])
    if ran_backward and sink is not None:
        if sampled:
            for kind in kinds:
                dsink[kind] = _sum(comm, reference.sink_gradient(lse, delta, sink, kind))
        errors.add("dsink", _sum(comm, local["dsink"]), dsink)
    return errors.checks()


def error_bounds(
    dtype: np.dtype,
    softmax_scale: float,
    norms: Mapping[str, float],
    largest: Mapping[str, float],
    same_precision: Mapping[str, float],
) -> dict[str, float]:
    """Largest error that each result may have.

    Parameters
    ----------
    dtype : dtype
        Of the tensors of the run.
    softmax_scale : float
    norms : mapping of str to float
        Largest Euclidean norm of a (token, head) row of q, k, v and, for gradients, dout; with a
        sink also "dsink", the largest sum over tokens of ``exp(sink - lse) |dout| |out|``.
    largest : mapping of str to float
        Largest absolute value of the float64 reference, by result (out, lse, dq, dk, dv, dsink).
    same_precision : mapping of str to float
        Largest error, by result, of the plain dense computation (in float32 for 16-bit tensors)
        whose results are kept in `dtype`.

    Returns
    -------
    dict of str to float
        ``2 same_precision + eps ((2 + L) largest + T)``, where L is the largest absolute lse,
        which stands for the logits that count: their rounding is a relative error of the
        exponentials (an absolute one of lse).  T bounds the terms of a gradient before they
        cancel, by Cauchy-Schwarz; eps is the machine epsilon of the computation.
        In float64, where no second computation is at hand, ``1e-12 (largest + T)`` takes the place
        of the first term: T bounds the terms of one token, and the rounding of thousands adds up.
        16-bit results may be off by half a rounding (a quarter of their eps times `largest`) more:
        how often one is close to a power of two is a matter of luck.

        NaN, which nothing passes, where that is not finite or proves nothing: where it is more
        than a tenth of `largest`, the values it bounds (for lse, whose errors are relative ones
        of the probabilities: of 1), and more than half of the digits of the terms leave.  Values
        may cancel to nothing, such as dq and dk of queries that see one key each: what can be
        told of these is that they are small beside their terms.
    """
    dp = abs(softmax_scale) * norms["v"] * norms.get("dout", 0.0)
    terms = {"dq": dp * norms["k"], "dk": dp * norms["q"], "dsink": norms.get("dsink", 0.0)}
    eps = float(np.finfo(compute_dtype(dtype)).eps)
    half_of_digits = math.sqrt(ml_dtypes.finfo(dtype).eps)
    bounds = {}
    for name, value in largest.items():
        size = 1.0 if name == "lse" else value
        of_terms = terms.get(name, 0.0)
        double = dtype == np.float64
        first = 1e-12 * (value + of_terms) if double else 2 * same_precision[name]
        bound = first + eps * ((2 + largest["lse"]) * size + of_terms)
        if dtype.itemsize == 2 and name not in ("lse", "dsink"):
            bound += float(ml_dtypes.finfo(dtype).eps) / 4 * size
        term = {"out": norms["v"], "dv": norms.get("dout", 0.0), **terms}.get(name, 0.0)
        says = math.isfinite(bound) and bound <= max(size / 10, half_of_digits * term)
        bounds[name] = bound if says else math.nan
    return bounds


def worse(a: Check, b: Check) -> Check:
    """The one to report of two checks of one tensor: a failed one, or that nearer its bound."""
    if a.passed and b.passed:
        return a if a.error * b.bound >= b.error * a.bound else b
    return b if a.passed else a


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """A hash of the bits of each tensor."""
    return {
        # As bytes: Python's buffers know no bfloat16.
        name: hashlib.blake2b(np.ascontiguousarray(x).reshape(-1).view(np.uint8)).digest()
        for name, x in tensors.items()
    }


class _Errors:
    """Largest errors by tensor, over all blocks and ranks."""

    def __init__(
        self, comm: MPI.Intracomm, plan: AttentionPlan, local: Mapping[str, np.ndarray]
    ) -> None:
        self._comm, self._dtype, self._plain = comm, plan.dtype, plan.compute_dtype
        self._seen: dict[str, list[float]] = {}
        self._scale = plan.softmax_scale
        self._norms = {
            name: comm.allreduce(_largest_norm(local[name]), op=MPI.MAX)
            for name in ("q", "k", "v", "dout")
            if name in local
        }
        if "dsink" in local:
            sizes = (np.linalg.norm(local[x].astype(np.float64), axis=-1) for x in ("dout", "out"))
            largest = -reference.sink_gradient(local["lse"], np.multiply(*sizes), local["sink"])
            self._norms["dsink"] = float(_sum(comm, largest).max())

    def add(self, name: str, computed: np.ndarray, values: Mapping[np.dtype, np.ndarray]) -> None:
        exact, computed = values[np.dtype(np.float64)], computed.astype(np.float64)
        finite = np.isfinite(exact)
        # Only lse may be infinite, of a query that sees no key.
        comparable = (finite | np.isneginf(exact) if name == "lse" else finite).all()
        new = [
            _distance(computed, exact) if comparable else math.inf,
            _distance(values[self._plain], exact),
            float(np.abs(exact[finite]).max(initial=0)),
        ]
        seen = self._seen.setdefault(name, [0.0, 0.0, 0.0, 0])
        seen[:] = [*map(max, seen, new), seen[3] + len(computed)]

    def checks(self) -> dict[str, Check]:
        def over_ranks(column: int, op: MPI.Op = MPI.MAX) -> dict[str, float]:
            return {x: self._comm.allreduce(seen[column], op=op) for x, seen in self._seen.items()}

        error, same_precision, largest = map(over_ranks, range(3))
        rows = over_ranks(3, MPI.SUM)
        bounds = error_bounds(self._dtype, self._scale, self._norms, largest, same_precision)
        return {name: Check(error[name], bounds[name], rows[name]) for name in error}


def _largest_norm(x: np.ndarray) -> float:
    norms = np.linalg.norm(x.astype(np.float64), axis=-1)
    return float(np.nan_to_num(norms, nan=math.inf, posinf=math.inf).max(initial=0))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest |a - b|; equal infinities are at distance 0, NaN is infinitely far from all."""
    distance = np.where(a == b, 0, np.abs(a - b))
    return float(np.nan_to_num(distance, nan=math.inf, posinf=math.inf).max(initial=0))


def _blocks(seqlen: int, rows: int | None, seed: int) -> list[np.ndarray]:
    """Sorted token indices to check, in blocks: all, or a sample with both ends."""
    tokens = np.arange(seqlen)
    if rows is not None and rows < seqlen:
        chosen = np.random.default_rng(seed).choice(seqlen, rows, replace=False)
        tokens = np.union1d(chosen, [0, seqlen - 1])
    return np.array_split(tokens, -(-len(tokens) // BLOCK))


def _share(
    plan: AttentionPlan, tokens: np.ndarray, local: Mapping[str, np.ndarray], *names: str
) -> list:
    """Rows of the named tensors at `tokens`, from their owners to all ranks.

    Returns the slice of the gathered rows that this rank owns, the order of the gathered rows
    within `tokens`, and the gathered rows of each tensor.
    """
    own = np.flatnonzero(np.isin(tokens, plan.tokens, assume_unique=True))
    where = np.searchsorted(plan.tokens, tokens[own])
    shares = plan.grid.comm.allgather([own, *(local[x][where] for x in names if x in local)])
    start = sum(len(share[0]) for share in shares[: plan.grid.comm.rank])
    return [slice(start, start + len(own)), *(np.concatenate(x) for x in zip(*shares))]


def _sum(comm: MPI.Intracomm, x: np.ndarray) -> np.ndarray:
    total = np.empty_like(x)
    comm.Allreduce(x, total)
    return total


def _merge(
    comm: MPI.Intracomm, out: np.ndarray, lse: np.ndarray, sink: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over all keys and the sink from attention over each rank's keys."""
    shift = np.empty_like(lse)
    comm.Allreduce(lse, shift, op=MPI.MAX)
    if sink is not None:
        shift = np.maximum(shift, sink.astype(lse.dtype))
    shift[np.isneginf(shift)] = 0
    weight = np.exp(lse - shift)
    total = _sum(comm, weight)
    if sink is not None:
        total += np.exp(sink.astype(lse.dtype) - shift)
    out = _sum(comm, out * weight[..., None])
    lse = np.log(total) + shift
    return out / np.where(total > 0, total, 1)[..., None], lse
