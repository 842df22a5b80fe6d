"""Checks of a distributed run against float64, on its own ranks, without an N x N matrix anywhere.

The reference shares nothing with the algorithms: chosen query rows go to all ranks, each computes
their dense attention over the keys that it owns in float64, and plain sums over all ranks give
out, lse and dq.  The same is done once more in the precision of the run: twice the error of that
plain computation, plus a term for rounding the inputs' products, bounds the error of the run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import ROUNDED, AttentionPlan
from a2d_mpi.core import reference
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.sizes import Layout
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.experiments.results import Check
from a2d_mpi.schedules import METHODS, roundings

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
        a value or the reference is not finite, and its bound, NaN where there is none.  Of a plan
        with `wire` also the error against the tensors as given, but for dk and dv of a sample.

    Notes
    -----
    out, lse and dq of a checked row are compared with exact values.  A row of dk or dv depends on
    lse and delta of *every* query.  With all rows checked these are exact too; in a sample they
    are the run's own (delta from its out), which the sampled query rows vouch for: an error of
    lse is a relative one of all probabilities, and lse has no bound beyond a tenth of a nat.

    A plan with `wire` is compared with exact values of the tensors rounded to that format (by
    `reference.rounded`, which shares no code with the plan), and its gradients with those at its
    own out: no bound is needed for what the rounding of q, k, v and dout does.  The rounding of
    partial results widens the bounds: see `error_bounds`.
    """
    local, wire, double = dict(tensors), plan.config.wire, np.dtype(np.float64)
    if "dsink" in local:
        local["dsink"] = _sum(plan.grid.comm, local["dsink"])
    as_given: dict[str, float] = {}
    if wire:
        sampled = rows is not None and rows < plan.seqlen
        for name, where, value, _ in _reference(plan, local, rows, seed, double, own_out=False):
            if not (sampled and name in ("dk", "dv")):
                error = _distance(local[name][where].astype(np.float64), value)
                as_given[name] = max(error, as_given.get(name, 0.0))
        for name in ROUNDED:
            if name in local and plan.config.rounds(name):
                local[name] = reference.rounded(local[name], wire)
    exact = _reference(plan, local, rows, seed, double)
    if plan.compute_dtype == np.float64:
        both = ((x, x) for x in exact)
    else:
        both = zip(exact, _reference(plan, local, rows, seed, plan.compute_dtype))
    seen: dict[str, list[float]] = {}  # by tensor, of all blocks on this rank
    for (name, where, value, terms), (_, _, same_precision, _) in both:
        computed, finite = local[name][where].astype(np.float64), np.isfinite(value)
        # Only lse may be infinite, of a query that sees no key.
        comparable = (finite | np.isneginf(value) if name == "lse" else finite).all()
        new = [
            _distance(computed, value) if comparable else math.inf,
            _distance(same_precision, value),
            float(np.abs(value[finite]).max(initial=0)),
            float(terms.max(initial=0)),
        ]
        before = seen.setdefault(name, [0.0, 0.0, 0.0, 0.0, 0])
        before[:] = [*map(max, before, new), before[4] + len(computed)]

    def over_ranks(column: int, op: MPI.Op = MPI.MAX) -> dict[str, float]:
        return {x: plan.grid.comm.allreduce(y[column], op=op) for x, y in seen.items()}

    error, same_precision, largest, terms = map(over_ranks, range(4))
    checked = over_ranks(4, MPI.SUM)
    as_given = {x: plan.grid.comm.allreduce(y, op=MPI.MAX) for x, y in as_given.items()}
    norms = _norms(plan.grid.comm, local)
    sizes = plan.dtype, plan.softmax_scale, norms, largest, same_precision
    widening = wire_errors(plan.method, plan.layout, plan.config, terms) if wire else None
    bounds = error_bounds(*sizes, widening)
    return {
        name: Check(error[name], bounds[name], checked[name], as_given.get(name)) for name in error
    }


def wire_errors(
    method: str, layout: Layout, config: AttentionConfig, terms: Mapping[str, float]
) -> dict[str, float]:
    """Largest error of each result that the rounding of partial results may cause.

    Parameters
    ----------
    method, layout, config
        Of the plan, with `wire`.
    terms : mapping of str to float
        By result, the largest sum of the sizes of its parts: of the contributions of the keys
        (for out and dq) or of the queries (for dk and dv) of every piece of every shard.  A
        partial result is a sum of some of them.  The size of an element x of a part is
        ``(u |x| + f X) / (u + f)``, X the largest of its head: u is `Format.error`, f
        `Format.floor`.

    Returns
    -------
    dict of str to float
        ``((1 + u + f)^h - 1) terms``: h is how often a result is rounded on its way
        (`a2d_mpi.schedules.roundings`).  One rounding adds at most u + f times the size of the
        partial result to the error, and these sizes add up to the terms at most.
        0 of lse, which is not rounded.
    """
    found, form = {}, FORMATS[config.wire]
    for name, size in terms.items():
        kind = {"dk": "dkv", "dv": "dkv"}.get(name, name)
        h = roundings(method, layout, kind) if config.rounds(name, accumulated=True) else 0
        found[name] = ((1 + form.error + form.floor) ** h - 1) * size
    return found


def _reference(
    plan: AttentionPlan,
    local: Mapping[str, np.ndarray],
    rows: int | None,
    seed: int,
    kind: np.dtype,
    own_out: bool = True,
) -> Iterator[tuple[str, np.ndarray | slice, np.ndarray, np.ndarray]]:
    """The results of dense attention in one precision, block after block.  Collective.

    `own_out`: of a plan with `wire`, the gradients are those at the run's own out.

    Yields
    ------
    name : str
        Of a tensor.
    where : indices
        This rank's rows of it that are in the block.
    value : array
        What these should be, rounded as the run's dtype keeps it; in float64: not rounded.
    terms : array
        Of a plan with `wire`, in float64: as `wire_errors` takes them.
    """
    comm, backward, sink = plan.grid.comm, "dq" in local, local.get("sink")
    sampled = rows is not None and rows < plan.seqlen
    double = kind == np.float64
    options = {
        "softmax_scale": plan.softmax_scale,
        "dtype": kind,
        # The run's kernel rounds factors, the reference does not.
        "products": None if double else plan.product_dtype,
        "logit_softcap": plan.logit_softcap,
    }

    own_out = own_out and plan.config.wire is not None
    widens = own_out and double

    def stored(x: np.ndarray) -> np.ndarray:
        return x if double else x.astype(plan.dtype).astype(kind)

    # Of a plan with `wire`, the pieces of this rank's tokens of which partial results may be.
    pieces, group = [slice(None)], 1
    if widens:
        cuts = METHODS[plan.method].cuts(plan.problem.cp_group(plan.grid.heads))
        ends = [0, *np.searchsorted(plan.tokens, cuts).tolist(), len(plan.tokens)]
        pieces, group = [slice(a, b) for a, b in pairwise(ends)], plan.nheads // plan.nheads_kv

    def size(part: np.ndarray) -> np.ndarray:
        """What `wire_errors` takes of a part: small elements are as far off as large ones."""
        form, part = FORMATS[plan.config.wire], np.abs(part)
        largest = part.max(axis=-1, keepdims=True)
        return (form.error * part + form.floor * largest) / (form.error + form.floor)

    def total(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The sum over pieces and ranks and, if it is used, the sum of sizes."""
        value = _sum(comm, sum(parts))
        return value, _sum(comm, sum(map(size, parts))) if widens else np.zeros_like(value)

    q, k, v, dout = (local.get(x) for x in ("q", "k", "v", "dout"))
    if backward:  # those of the run, or in the end the exact ones
        own_lse = local["lse"].astype(np.float64)
        own_delta = (dout.astype(np.float64) * local["out"]).sum(axis=-1)
    for tokens in _blocks(plan.seqlen, rows, seed):
        names = ("q", "dout", "out") if own_out else ("q", "dout")
        own, order, q_rows, *others = _share(plan, tokens, local, *names)
        visible = plan.mask.dense(tokens[order], plan.tokens)
        where = np.searchsorted(plan.tokens, tokens[order][own])
        part, part_lse = reference.attention(q_rows, k, v, visible, **options)
        out, lse = _merge(comm, part, part_lse, sink)
        out, terms = stored(out), np.zeros_like(out)
        if widens:
            shift = np.where(np.isneginf(lse), 0, lse)
            parts = [
                reference.attention(q_rows, k[x], v[x], visible[:, x], **options) for x in pieces
            ]
            _, terms = total([y * np.exp(z - shift)[..., None] for y, z in parts])
        yield "out", where, out[own], terms[own]
        yield "lse", where, lse[own], np.zeros_like(lse[own])
        if backward:
            dout_rows, at = others[0], others[1] if own_out else out
            delta = (np.asarray(dout_rows, kind) * at).sum(axis=-1)
            dq, terms = total(
                [
                    reference.attention_backward(
                        dout_rows, q_rows, k[x], v[x], lse, delta, visible[:, x], **options
                    )[0]
                    for x in pieces
                ]
            )
            yield "dq", where, stored(dq)[own], terms[own]
            if not sampled:
                own_lse[where], own_delta[where] = lse[own], delta[own]
    if not backward:
        return
    for tokens in _blocks(plan.seqlen, rows, seed + 1):
        own, order, k_rows, v_rows = _share(plan, tokens, local, "k", "v")
        visible = plan.mask.dense(plan.tokens, tokens[order])
        where = np.searchsorted(plan.tokens, tokens[order][own])
        # Of every query head: a sum over heads may travel before it is complete.
        k_rows, v_rows = (np.repeat(x, group, axis=1) for x in (k_rows, v_rows))
        parts = [
            reference.attention_backward(
                *(dout[x], q[x], k_rows, v_rows, own_lse[x], own_delta[x], visible[x]), **options
            )
            for x in pieces
        ]
        for name, number in (("dk", 1), ("dv", 2)):
            dx, terms = (
                x.reshape(len(x), -1, group, x.shape[2]).sum(axis=2)
                for x in total([part[number] for part in parts])
            )
            yield name, where, stored(dx[own]), terms[own]
    if sink is not None:
        gradient = reference.sink_gradient(own_lse, own_delta, sink, kind)
        yield "dsink", slice(None), _sum(comm, gradient), np.zeros_like(gradient)


def _norms(comm: MPI.Intracomm, local: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The norms that `error_bounds` takes."""
    names = [name for name in ("q", "k", "v", "dout") if name in local]
    norms = {name: comm.allreduce(_largest_norm(local[name]), op=MPI.MAX) for name in names}
    if "dsink" in local:
        sizes = (np.linalg.norm(local[x].astype(np.float64), axis=-1) for x in ("dout", "out"))
        largest = -reference.sink_gradient(local["lse"], np.multiply(*sizes), local["sink"])
        norms["dsink"] = float(_sum(comm, largest).max())
    return norms


def error_bounds(
    dtype: np.dtype,
    softmax_scale: float,
    norms: Mapping[str, float],
    largest: Mapping[str, float],
    same_precision: Mapping[str, float],
    widening: Mapping[str, float] | None = None,
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
    widening : mapping of str to float, optional
        Of a run with a narrow format on the wire: what `wire_errors` adds to each bound.

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
        told of these is that they are small beside their terms.  With `widening` the tenth is
        the whole: the bound tells a result from zeros.
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
        least = size / 10
        if widening and widening.get(name):
            bound, least = bound + widening[name], size
        says = math.isfinite(bound) and bound <= max(least, half_of_digits * term)
        bounds[name] = bound if says else math.nan
    return bounds


def worse(a: Check, b: Check) -> Check:
    """The one to report of two checks of one tensor: a failed one, or that nearer its bound.

    With the larger of both errors against the tensors as given.
    """
    as_given = max((x.as_given for x in (a, b) if x.as_given is not None), default=None)
    if a.passed and b.passed:
        found = a if a.error * b.bound >= b.error * a.bound else b
    else:
        found = b if a.passed else a
    return replace(found, as_given=as_given)


def digests(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """A hash of the bits of each tensor."""
    return {
        # As bytes: Python's buffers know no bfloat16.
        name: hashlib.blake2b(np.ascontiguousarray(x).reshape(-1).view(np.uint8)).digest()
        for name, x in tensors.items()
    }


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
