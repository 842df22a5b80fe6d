"""Attention and its gradients by dense formulas, and the errors that others may have.

The float64 results do not depend on the number of ranks.  With ``A2D_TEST_RESULTS=FOLDER`` runs of
the same version of the tests share them in this folder.
"""

import hashlib
import os
import pickle
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
from helpers import bounds_for, distance
from mpi4py import MPI

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsink")


def plain(
    inputs,
    visible,
    scale,
    cap=None,
    sink=None,
    dtype=np.float64,
    kept=None,
    dlse=None,
    at=None,
    rng=None,
    products=None,
):
    """All results of the dense computation in `dtype`; out is kept in `kept`.

    `products`: dtype to which probabilities are rounded.

    `at`: another out, whose gradients are computed.  `rng` draws the orders of sums, others in the
    backward pass: what one order rounds is one draw of what rounding may do.
    """
    q, k, v, dout = (x.astype(dtype) for x in inputs)
    sizes = len(k), q.shape[2], q.shape[2], v.shape[2]
    keys, first, again, of_v = (np.arange(n) if rng is None else rng.permutation(n) for n in sizes)
    k, v, visible, dout = k[keys], v[keys][..., of_v], visible[:, keys], dout[..., of_v]
    given = q[..., first], k[..., first], v, visible, scale, dtype, products
    out, lse = reference.attention(*given, logit_softcap=cap, sink=sink)
    if kept is not None:
        out = out.astype(kept).astype(dtype)
    delta = (dout * (out if at is None else at[..., of_v].astype(dtype))).sum(-1)
    if dlse is not None:
        delta -= dlse.astype(dtype)
    given = dout, q[..., again], k[..., again], v, lse, delta, visible, scale, dtype, products
    dq, dk, dv = reference.attention_backward(*given, logit_softcap=cap)
    keys, again, of_v = map(np.argsort, (keys, again, of_v))  # back to the caller's orders
    gradients = dq[..., again], dk[keys][..., again], dv[keys][..., of_v]
    found = dict(zip(TENSORS, (out[..., of_v], lse, *gradients)))
    return found if sink is None else found | {
        "dsink": reference.sink_gradient(lse, delta, sink, dtype)
    }  # fmt: skip


def shared(inputs, visible, scale, cap, sink, dlse, order=0, **options):
    """`plain` by all ranks of the world together; a number other than 0 is an order of sums."""
    world, group, heads = MPI.COMM_WORLD, inputs[0].shape[1] // inputs[1].shape[1], {}
    for h in range(world.rank, inputs[0].shape[1], world.size):
        one, of = slice(h, h + 1), slice(h // group, h // group + 1)
        own = [x[:, y] for x, y in zip(inputs, (one, of, of, one))]
        sink_h, dlse_h = (None if x is None else x[..., one] for x in (sink, dlse))
        rng = np.random.default_rng([order, h]) if order else None
        heads[h] = plain(own, visible, scale, cap, sink_h, dlse=dlse_h, rng=rng, **options)
    every = {h: x for part in world.allgather(heads) for h, x in part.items()}
    whole = {x: np.concatenate([every[h][x] for h in sorted(every)], -1 - (every[0][x].ndim > 2))
             for x in every[0]}  # fmt: skip
    for x in ("dk", "dv"):
        whole[x] = whole[x].reshape(len(whole[x]), -1, group, whole[x].shape[2]).sum(2)
    return whole


def bounds(inputs, visible, scale, cap, sink, exact, dtype, dlse=None, products=None):
    """Largest errors that results of a run in `dtype` may have."""
    kinds = compute_dtype(dtype), dtype
    same = plain(inputs, visible, scale, cap, sink, *kinds, dlse, products=products)
    return widened(inputs, scale, sink, exact, dtype, dlse, errors_of(same, exact, dtype))


def errors_of(same, exact, dtype):
    """Errors of a plain computation whose tensors are kept in `dtype`."""
    narrow = {x: same[x] if x in ("lse", "dsink") else same[x].astype(dtype) for x in exact}
    return {x: distance(y, exact[x]) for x, y in narrow.items()}


def widened(inputs, scale, sink, exact, dtype, dlse, errors):
    """Largest errors of a run, from those of a plain computation."""
    found = bounds_for(dtype, scale, inputs, exact, errors)
    if sink is not None:
        p = np.exp(sink - np.where(np.isneginf(exact["lse"]), 0, exact["lse"]))
        sizes = [np.linalg.norm(x.astype(float), axis=-1) for x in (inputs[3], exact["out"])]
        terms = sizes[0] * sizes[1] + (0 if dlse is None else np.abs(dlse))
        term = float((p * terms).sum(0).max())
        found["dsink"] = 2 * errors["dsink"] + np.finfo(compute_dtype(dtype)).eps * (
            (2 + distance(np.nan_to_num(exact["lse"], neginf=0), 0)) * term
        )
        if dtype == np.float64:
            found["dsink"] += 1e-12 * distance(exact["dsink"], 0)
        if np.dtype(dtype).itemsize == 2:  # delta has the roundings of out and of partial outs
            squares = (inputs[3].astype(float) * exact["out"]) ** 2
            deviation = np.sqrt((p**2 * squares.sum(-1)).sum(0).max() / 12)
            found["dsink"] += 6 * float(ml_dtypes.finfo(dtype).eps) * deviation
    return found


def out_of_bounds(found, exact, largest):
    """What is out of bounds, in words that begin with its name."""
    errors = {x: distance(found[x], exact[x]) for x in exact}
    return [
        f"{x}: {errors[x]:.2e} > {largest[x]:.2e}" for x in exact if not errors[x] <= largest[x]
    ]


def slopes(value, x, step=1e-6):
    """Differences of a value, divided by the step, in each element of the array that it reads."""
    found = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        before, both = x[index], []
        for sign in (1, -1):
            x[index] = before + sign * step
            both.append(value())
        x[index] = before
        found[index] = (both[0] - both[1]) / (2 * step)
    return found


class Problem:
    """Whole inputs of a plan, perhaps a sink and a gradient of lse.

    `solution`, exact results and the largest errors that a plan may have, is collective over the
    world when it is first asked for.
    """

    def __init__(self, mask, config, sinks, with_dlse, size, seed):
        self.mask, self.config, self.size = mask, config, size
        rng, kept = np.random.default_rng(seed), DTYPES[config.dtype]
        wide = compute_dtype(kept)

        def drawn(name, dtype, size=1.0):
            n = config.seqlen_kv if name in "kv" else config.seqlen
            return (size * rng.standard_normal((n, *config.shape(name)))).astype(dtype)

        self.inputs = [
            drawn(x, kept, size if x == "q" else 1).astype(float) for x in ("q", "k", "v", "dout")
        ]
        self.sink = rng.standard_normal(config.nheads).astype(wide) + 1 if sinks else None
        self.dlse = 3 * drawn("dlse", wide) if with_dlse else None

    @cached_property
    def solution(self):
        visible = self.mask.dense(np.arange(self.config.seqlen), np.arange(self.config.seqlen_kv))
        return solve(self.inputs, visible, self.config, self.sink, self.dlse, self.size)

    def shards(self, plan):
        """This rank's q, k, v and dout, by name."""
        tokens = (plan.tokens, plan.tokens_kv, plan.tokens_kv, plan.tokens)
        whole = zip(("q", "k", "v", "dout"), self.inputs, tokens)
        return {name: x[mine].astype(plan.dtype) for name, x, mine in whole}


@cache
def problem(mask, config, sinks=False, with_dlse=False, size=1.0, seed=3):
    """A problem with the sizes and the dtype of a plan's config."""
    return Problem(mask, config, sinks, with_dlse, size, seed)


def problem_for(plan, **options):
    """The problem of a plan; a narrow format of its messages does not count."""
    return problem(plan.mask, replace(plan.config, wire=None), **options)


def solve(inputs, visible, config, sink=None, dlse=None, size=1.0):
    """Exact results and bounds of a plan with this config; collective over the world."""
    given = inputs, visible, config.softmax_scale, config.logit_softcap, sink, dlse
    world, path, found = MPI.COMM_WORLD, None, None
    # Only rank 0 need see the folder.
    if world.rank == 0 and "A2D_TEST_RESULTS" in os.environ:
        name = hashlib.sha256(pickle.dumps((config.dtype, size, given))).hexdigest()
        path = Path(os.environ["A2D_TEST_RESULTS"], name)
        found = pickle.loads(path.read_bytes()) if path.exists() else None
    found = world.bcast(found) or _solved(given, DTYPES[config.dtype], size)
    if path and not path.exists():
        path.with_suffix(".tmp").write_bytes(pickle.dumps(found))
        path.with_suffix(".tmp").rename(path)
    return found


@cache
def products_of(dtype):
    """The dtype to which the kernel of this CPU rounds probabilities, None without rounding."""
    return getattr(make_kernel("auto", HOST, dtype, 1.0), "product_dtype", None)


def _solved(given, dtype, size):
    inputs, _, scale, _, sink, dlse = given
    exact, errors = shared(*given), []
    # Orders of summation: one error in float32 is one draw of what rounding may do, and with huge
    # logits, where few keys count, draws differ much.
    for order in range(5 if size > 1 else 1):
        if dtype != np.float64:  # whose bound needs no errors
            kinds = {"dtype": compute_dtype(dtype), "kept": dtype}
            same = shared(*given, order, **kinds, products=products_of(dtype))
        errors.append(errors_of(exact if dtype == np.float64 else same, exact, dtype))
    # Huge logits are rounded in the forward pass and again, otherwise, in the backward pass: two
    # draws of the error that counts, where the dense computation makes one.
    draws = 2**0.5 if size > 1 else 1
    largest = {x: draws * max(error[x] for error in errors) for x in exact}
    return exact, widened(inputs, scale, sink, exact, dtype, dlse, largest)


def results_of(plan, given, dlse=None, upload=np.asarray, download=np.asarray):
    """This rank's results of a problem.

    Collective.  dsink is summed over the ranks; elements of dlse of masked rows are NaN.
    """
    q, k, v, dout = map(upload, given.shards(plan).values())
    sink = None if given.sink is None else upload(given.sink)
    out, lse = plan.forward(q, k, v, sink)
    if dlse is not None:
        dlse = dlse[plan.tokens].copy()
        dlse[np.isneginf(download(lse))] = np.nan  # ignored
        dlse = upload(dlse)
    gradients = plan.backward(dout, q, k, v, out, lse, sink, dlse=dlse)
    found = dict(zip(TENSORS, map(download, (out, lse, *gradients))))
    if sink is not None:
        found["dsink"] = plan.grid.comm.allreduce(found["dsink"])
    return found


def wrong_in(plan, found, given, slack=0.0):
    """What of this rank's results is out of bounds or of another dtype, in words; collective."""
    exact, largest = given.solution
    rows = dict.fromkeys(("dk", "dv"), plan.tokens_kv) | {"dsink": slice(None)}
    mine = {x: y[rows.get(x, plan.tokens)] for x, y in exact.items()}
    dtypes = dict.fromkeys(("lse", "dsink"), plan.compute_dtype)
    wide = [f"{x} is {y.dtype}" for x, y in found.items() if y.dtype != dtypes.get(x, plan.dtype)]
    largest = {x: y + slack for x, y in largest.items()}
    return [f"{plan.dtype} {x}" for x in out_of_bounds(found, mine, largest) + wide]


def wrong_with(plan, given=None, dlse=None, slack=0.0, **ways):
    """What is wrong with this rank's results of a problem, by default its own; collective."""
    given = given or problem_for(plan)
    return wrong_in(plan, results_of(plan, given, dlse, **ways), given, slack)
