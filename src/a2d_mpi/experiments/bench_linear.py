"""The program of `drivers/bench.py linear`: check and time linear and exact attention.

::

    /                       attributes: schema, schema_version, origin
    /config                 attributes: options
    /runs/<plan>/<tokens>   attribute passed
        checks/<tensor>     attributes: error, bound, rows, passed
        seconds             (trials, ranks, phases) seconds of calls: forward, backward
        sent                (ranks, phases) bytes of a call
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import squarest
from a2d_mpi.experiments.benchmark import measured, random_inputs, within
from a2d_mpi.experiments.check import check_attention, samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.measure import random_rows
from a2d_mpi.experiments.options import SAMPLE
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.results import LINEAR_SCHEMA
from a2d_mpi.linear.plan import LinearAttention
from a2d_mpi.masks.mask import Causal

LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
RESULTS = ("out", "lse", "dq", "dk", "dv")
COLUMNS = ("plan", "tokens", "forward", "backward", "sent MB", "error")
Plan = AttentionPlan | LinearAttention


def bench_linear(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all plans at all lengths; return the exit code."""
    together(comm, lambda: check_output(args.output, LINEAR_SCHEMA), on=0)
    most = -(-max(args.seqlens) // comm.size)
    # 30 arrays in float64: copies, features, gradients.
    nbytes = 30 * 8 * args.nheads * args.headdim * most
    check_room(comm, f"{max(args.seqlens)} tokens (--seqlens) on one rank", nbytes)
    grid = ProcessGrid(comm, *squarest(comm.size))
    runs = {
        f"{name}/{seqlen}": partial(_run, grid, args, name, seqlen)
        for seqlen in args.seqlens
        for name in args.plans
    }
    options = {x: str(y) for x, y in vars(args).items() if x not in ("output", "command")}
    code = measured(comm, COLUMNS, runs, args.output, LINEAR_SCHEMA, options)
    grid.free()
    return code


def _run(
    grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int
) -> tuple[dict[str, np.ndarray], Sequence[str], dict[str, Check]]:
    """Measure one plan at one length; return its arrays, its row and its checks.

    The first call is checked.
    """
    comm, seconds = grid.comm, []
    plan = _plan(grid, args, name, seqlen)
    tensors = random_inputs(plan, True, args.seed)
    for trial in range(args.trials):
        results = _called(plan, tensors)
        seconds.append([plan.timings[f"{phase}/total"] for phase in PHASES])
        if trial == 0:
            counted = {key: sent for key, (sent, _) in plan.traffic.bytes.items()}
            off = comm.allreduce(plan.traffic.bytes != plan.predicted_traffic())
            checks = {"traffic": Check(float(off), 0.0, comm.size)}
            if name in LINEAR:
                checks |= _check_linear(plan, tensors | results, args.seed)
            else:
                checks |= check_attention(plan, tensors | results, SAMPLE, args.seed)
    sent = [sum(n for key, n in counted.items() if key[0] == phase) for phase in PHASES]
    gathered = comm.gather((seconds, sent)) or [(seconds, sent)]
    plan.free()
    seconds, sent = map(np.array, zip(*gathered))
    times = np.median(seconds.max(axis=0), axis=0)  # of the slowest rank
    megabytes, error = sent.sum(axis=1).max() / 1e6, max(x.error for x in checks.values())
    row = name, f"{seqlen}", *(f"{x:.3f}" for x in (*times, megabytes)), f"{error:.1e}"
    return {"seconds": seconds.swapaxes(0, 1), "sent": sent}, row, checks


def _plan(grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int) -> Plan:
    names = "nheads", "headdim", "dtype", "threads"
    sizes = {"seqlen": seqlen, **{x: getattr(args, x) for x in names}}
    if name not in LINEAR:
        return make_plan(name, grid, Causal(), **sizes)
    return LinearAttention(grid, Causal(), **sizes, norm="none", states=LINEAR[name])


def _called(plan: Plan, tensors: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Call each phase once; return the results.  Linear attention has its `Kept` as "lse"."""
    q, k, v, dout = (tensors[x] for x in ("q", "k", "v", "dout"))
    plan.grid.comm.Barrier()
    out, lse = plan.forward(q, k, v)
    plan.grid.comm.Barrier()
    return dict(zip(RESULTS, (out, lse, *plan.backward(dout, q, k, v, out, lse))))


def _check_linear(plan: LinearAttention, t: Mapping[str, object], seed: int) -> dict[str, Check]:
    """Compare sampled rows with dense linear attention in float64.

    Every rank computes the contributions of its own tokens to the sampled rows.
    """
    config, comm, own = plan.config, plan.grid.comm, plan.tokens
    tokens = np.concatenate(samples(config.seqlen, SAMPLE, seed))
    dout, q, k, v = (t[x].astype(np.float64) for x in ("dout", "q", "k", "v"))  # (n, H, D)
    dout_rows, q_rows, k_rows, v_rows = (
        random_rows(tokens, config.shape(name), plan.dtype, seed, stream).astype(np.float64)
        for stream, name in enumerate(("dout", "q", "k", "v"))
    )
    earlier, later = own <= tokens[:, None], own >= tokens[:, None]  # (rows, n)

    def summed(seen: np.ndarray, x: np.ndarray, y: np.ndarray, values: np.ndarray) -> np.ndarray:
        weights = np.einsum("rhd,nhd->hrn", x, y) * seen
        return comm.allreduce(np.einsum("hrn,nhd->rhd", weights, values))

    exact = {
        "out": summed(earlier, q_rows, k, v),
        "dq": summed(earlier, dout_rows, v, k),
        "dk": summed(later, v_rows, dout, q),
        "dv": summed(later, k_rows, q, dout),
    }
    mine, bound = np.isin(tokens, own), BOUNDS[plan.dtype.name]
    rows = np.searchsorted(own, tokens[mine])
    return {name: within(bound, t[name][rows], x[mine], comm) for name, x in exact.items()}
