"""Attention and its gradients by dense formulas, and the errors that others may have."""

from functools import cache
from typing import NamedTuple

import numpy as np
from helpers import bounds_for, distance

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES, compute_dtype

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsink")


def plain(
    inputs,
    visible,
    scale,
    cap=None,
    sink=None,
    dtype=np.float64,
    kept=None,
    products=None,
    dlse=None,
):
    """All results of the dense computation in `dtype`; out is kept in `kept`."""
    q, k, v, dout = (x.astype(dtype) for x in inputs)
    logits = {"products": products, "logit_softcap": cap}
    out, lse = reference.attention(q, k, v, visible, scale, dtype, sink=sink, **logits)
    if kept is not None:
        out = out.astype(kept).astype(dtype)
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta -= dlse.astype(dtype)
    gradients = reference.attention_backward(
        dout, q, k, v, lse, delta, visible, scale, dtype, **logits
    )
    found = dict(zip(TENSORS, (out, lse, *gradients)))
    return found if sink is None else found | {
        "dsink": reference.sink_gradient(lse, delta, sink, dtype)
    }  # fmt: skip


def bounds(inputs, visible, scale, cap, sink, exact, dtype, dlse=None, products=None):
    """Largest errors that results of a run in `dtype` may have."""
    compute = compute_dtype(dtype)
    same = plain(inputs, visible, scale, cap, sink, compute, dtype, products, dlse)
    narrow = {x: y if x in ("lse", "dsink") else y.astype(dtype) for x, y in same.items()}
    errors = {x: distance(y, exact[x]) for x, y in narrow.items()}
    found = bounds_for(dtype, scale, inputs, exact, errors)
    if sink is not None:
        p = np.exp(sink - np.where(np.isneginf(exact["lse"]), 0, exact["lse"]))
        sizes = [np.linalg.norm(x.astype(float), axis=-1) for x in (inputs[3], exact["out"])]
        terms = sizes[0] * sizes[1] + (0 if dlse is None else np.abs(dlse))
        term = float((p * terms).sum(0).max())
        found["dsink"] = 2 * errors["dsink"] + np.finfo(compute).eps * (
            (2 + distance(np.nan_to_num(exact["lse"], neginf=0), 0)) * term
        )
        if dtype == np.float64:
            found["dsink"] += 1e-12 * distance(exact["dsink"], 0)
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


class Problem(NamedTuple):
    """Whole inputs of a plan, perhaps a sink and a gradient of lse, exact results, and bounds."""

    inputs: list
    sink: np.ndarray | None
    dlse: np.ndarray | None
    exact: dict
    bounds: dict


@cache
def problem(mask, config, sinks=False, with_dlse=False):
    """A problem with the sizes and the dtype of a plan's config."""
    rng, kept, tokens = np.random.default_rng(3), DTYPES[config.dtype], np.arange(config.seqlen)
    wide = compute_dtype(kept)

    def drawn(name, dtype):
        return rng.standard_normal((config.seqlen, *config.shape(name))).astype(dtype)

    inputs = [drawn(x, kept).astype(float) for x in ("q", "k", "v", "dout")]
    sink = rng.standard_normal(config.nheads).astype(wide) + 1 if sinks else None
    dlse = 3 * drawn("dlse", wide) if with_dlse else None
    given = inputs, mask.dense(tokens, tokens), config.softmax_scale, config.logit_softcap, sink
    exact = plain(*given, dlse=dlse)
    return Problem(inputs, sink, dlse, exact, bounds(*given, exact, kept, dlse))


def wrong_with(plan, given, dlse=None, upload=np.asarray, download=np.asarray):
    """What is out of bounds on this rank, or of another dtype, in words.

    Collective.  dsink is summed over the ranks; elements of dlse of masked rows are NaN.
    """
    q, k, v, dout = (upload(x[plan.tokens].astype(plan.dtype)) for x in given.inputs)
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
    mine = {x: y if x == "dsink" else y[plan.tokens] for x, y in given.exact.items()}
    wide = {x for x, y in found.items() if y.dtype != plan.dtype} - {"lse", "dsink"}
    bad = out_of_bounds(found, mine, given.bounds) + [f"{x} is wide" for x in wide]
    return [f"{plan.dtype} {x}" for x in bad]
