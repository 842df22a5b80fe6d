"""The program of `drivers/bench.py linear`: check and time linear and exact attention.

::

    /                       attributes: schema, schema_version, origin
    /config                 attributes: options
    /runs/<plan>/<tokens>   attribute passed
        checks/<tensor>     attributes: error, bound, rows, passed
        seconds             (trials, ranks, phases) seconds of calls: forward, backward
        wait                (trials, ranks, phases) seconds of these in waits for messages
        sent                (ranks, phases) bytes of a call
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import squarest
from a2d_mpi.experiments.check import check_attention
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.hdf5 import check_output, write
from a2d_mpi.experiments.inputs import random_inputs, random_rows
from a2d_mpi.experiments.measure import origin_of
from a2d_mpi.experiments.options import FAILED_CHECK, SAMPLE
from a2d_mpi.experiments.results import LINEAR_SCHEMA, Check
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.tables import aligned
from a2d_mpi.linear.features import make_feature_map
from a2d_mpi.linear.norms import make_norm
from a2d_mpi.linear.plan import LinearAttention
from a2d_mpi.masks.patterns import make_mask

LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
RESULTS = ("out", "lse", "dq", "dk", "dv")


def bench_linear(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all plans at all lengths; returns the exit code."""
    together(comm, lambda: args.output and check_output(args.output, LINEAR_SCHEMA), on=0)
    token = 8 * args.nheads * args.headdim  # bytes of a token in float64
    # 30 arrays: copies, features, gradients.
    most = -(-max(args.seqlens) // comm.size)
    check_room(comm, f"{max(args.seqlens)} tokens (--seqlens) on one rank", 30 * token * most)
    grid, origin, entries = ProcessGrid(comm, *squarest(comm.size)), origin_of(comm), {}
    runs = [(name, seqlen) for seqlen in args.seqlens for name in args.plans]
    for name, seqlen in progress(runs, comm.rank, desc="plans x lengths"):
        entries[f"{name}/{seqlen}"] = _measured(grid, args, name, seqlen)
        if args.output:  # what there is, should the job be ended
            left_out = "output", "command"
            options = {x: str(y) for x, y in vars(args).items() if x not in left_out}
            tree = {**origin, "config": options, "runs": entries}
            together(comm, lambda x=tree: write(args.output, LINEAR_SCHEMA, x), on=0)
    grid.free()
    return comm.bcast(_report(entries) if comm.rank == 0 else None)


def _measured(grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int) -> dict | None:
    """Measure one plan at one length; return its run on rank 0.  The first call is checked."""
    comm, seconds, wait = grid.comm, [], []
    plan = _plan(grid, args, name, seqlen)
    tensors = random_inputs(plan, True, args.seed)
    for trial in range(args.trials):
        results = _called(plan, tensors)
        seconds.append([plan.timings[f"{phase}/total"] for phase in PHASES])
        wait.append([plan.timings[f"{phase}/wait"] for phase in PHASES])
        if trial == 0:
            counted = {key: sent for key, (sent, _) in plan.traffic.bytes.items()}
            checks = _checked(plan, args, name, tensors | results)
    sent = [sum(n for key, n in counted.items() if key[0] == phase) for phase in PHASES]
    gathered = comm.gather((seconds, wait, sent))
    plan.free()
    if gathered is None:
        return None
    seconds, wait, sent = map(np.array, zip(*gathered))
    arrays = {"seconds": seconds.swapaxes(0, 1), "wait": wait.swapaxes(0, 1), "sent": sent}
    passed = all(x.passed for x in checks.values())
    return {**arrays, "passed": passed, "checks": {x: y.attributes for x, y in checks.items()}}


def _plan(
    grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int
) -> AttentionPlan | LinearAttention:
    mask, names = make_mask(args.mask, seqlen), ("nheads", "headdim", "dtype", "threads")
    sizes = {"seqlen": seqlen, **{x: getattr(args, x) for x in names}}
    if name not in LINEAR:
        return make_plan(name, grid, mask, **sizes)
    names = ("feature_map", "norm", "decay", "distribution", "chunk", "seed")
    options = {x: getattr(args, x) for x in names}
    return LinearAttention(grid, mask, **sizes, **options, states=LINEAR[name])


def _called(
    plan: AttentionPlan | LinearAttention, tensors: dict[str, np.ndarray]
) -> dict[str, object]:
    """Call each phase once; return the results.  Linear attention has its `Kept` as "lse"."""
    q, k, v, dout = (tensors[x] for x in ("q", "k", "v", "dout"))
    plan.grid.comm.Barrier()
    out, lse = plan.forward(q, k, v)
    plan.grid.comm.Barrier()
    return dict(zip(RESULTS, (out, lse, *plan.backward(dout, q, k, v, out, lse))))


def _checked(
    plan: AttentionPlan | LinearAttention,
    args: argparse.Namespace,
    name: str,
    tensors: dict[str, object],
) -> dict[str, Check]:
    """Check sampled rows, and the counted bytes."""
    comm, counted = plan.grid.comm, plan.traffic.bytes
    if name in LINEAR:
        checks = _check_linear(plan, args, tensors)
    else:
        checks = check_attention(plan, tensors, SAMPLE, args.seed)
    off = comm.allreduce(counted != plan.predicted_traffic())
    return {**checks, "traffic": Check(float(off), 0.0, comm.size)}


def _check_linear(
    plan: LinearAttention, args: argparse.Namespace, t: dict[str, object]
) -> dict[str, Check]:
    """Compare sampled rows with dense linear attention in float64.

    Every rank computes the contributions of its own tokens to the sampled rows.  The gradients of
    k and v depend on out of all queries, which is taken from the run.  Feature maps and
    normalisations are the plan's, in float64; tests compare them with other code.
    """
    config, comm, own = plan.config, plan.grid.comm, plan.tokens
    chosen = np.random.default_rng(args.seed).integers(0, config.seqlen, SAMPLE)
    tokens, norm = np.union1d(chosen, [0, config.seqlen - 1]), make_norm(args.norm)
    sizes = config.headdim, config.headdim, args.seed, np.dtype(np.float64)
    here = make_feature_map(args.feature_map, own, *sizes)
    there = make_feature_map(args.feature_map, tokens, *sizes)

    def turned(x: np.ndarray) -> np.ndarray:  # (H, tokens, D)
        return x.swapaxes(0, 1).astype(np.float64)

    def with_ones(v: np.ndarray) -> np.ndarray:
        return np.concatenate([v, np.ones((*v.shape[:2], norm.columns))], axis=2)

    def sums(x: np.ndarray) -> np.ndarray:
        return comm.allreduce(x)

    def factors(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        lag = queries[:, None] - keys
        shown = lag >= 0 if args.mask == "causal" else np.ones_like(lag)
        return shown * (args.decay or 1.0) ** np.maximum(lag, 0)

    of_tokens = {
        name: turned(random_rows(tokens, config.shape(name), plan.dtype, args.seed, stream))
        for stream, name in enumerate(("dout", "q", "k", "v"))
    }
    fq, fk = here.forward(turned(t["q"])), here.forward(turned(t["k"]))
    v, v_rows = with_ones(turned(t["v"])), with_ones(of_tokens["v"])
    fq_rows, fk_rows = there.forward(of_tokens["q"]), there.forward(of_tokens["k"])
    exact, shown = {}, factors(tokens, own)  # (rows, n)
    out, scale = norm.forward(sums((fq_rows @ fk.swapaxes(1, 2) * shown) @ v).swapaxes(0, 1))
    do = norm.backward(of_tokens["dout"].swapaxes(0, 1), out, scale).swapaxes(0, 1)
    exact["out"] = out
    exact["dq"] = there.backward(sums((do @ v.swapaxes(1, 2) * shown) @ fk), fq_rows)
    shown = factors(own, tokens)  # (n, rows)
    do = turned(norm.backward(t["dout"].astype("f8"), t["out"].astype("f8"), t["lse"].scale))
    of_keys = (do @ v_rows.swapaxes(1, 2) * shown).swapaxes(1, 2)
    exact["dk"] = there.backward(sums(of_keys @ fq), fk_rows)
    weights = (fq @ fk_rows.swapaxes(1, 2) * shown).swapaxes(1, 2)
    exact["dv"] = sums(weights @ do)[..., : config.headdim]
    checks, mine = {}, np.isin(tokens, own)
    for name, x in exact.items():
        x = x if name == "out" else x.swapaxes(0, 1)  # (rows, H, D)
        error = np.abs(t[name][np.searchsorted(own, tokens[mine])] - x[mine]).max(initial=0)
        error = np.nan_to_num(error, nan=np.inf)  # MPI's maximum of a number and NaN may be either
        bound = BOUNDS[plan.dtype.name] * float(np.abs(x).max())
        checks[name] = Check(float(comm.allreduce(error, MPI.MAX)), bound, len(tokens))
    return checks


def _report(entries: dict[str, dict]) -> int:
    """Print the table, medians of the slowest rank; return the exit code."""
    columns = ["plan", "tokens", "forward", "wait", "backward", "wait", "sent MB", "error"]
    rows, failed = [[*columns, ""]], False
    for name, run in entries.items():
        plan, seqlen = name.split("/")
        seconds = np.median(run["seconds"].max(axis=1), axis=0)
        wait = np.median(run["wait"].mean(axis=1), axis=0)
        times = [f"{x:.3f}" for both in zip(seconds, wait) for x in both]
        sent = run["sent"].sum(axis=1).max() / 1e6
        error = max(x["error"] for x in run["checks"].values())
        mark, failed = "" if run["passed"] else "FAILED", failed or not run["passed"]
        rows.append([plan, seqlen, *times, f"{sent:.3f}", f"{error:.1e}", mark])
    print(aligned(rows))
    return FAILED_CHECK if failed else 0
