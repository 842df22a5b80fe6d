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
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import squarest
from a2d_mpi.experiments.check import check_attention, report, samples, within
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import origin_of, random_inputs, random_rows
from a2d_mpi.experiments.options import SAMPLE
from a2d_mpi.experiments.results import LINEAR_SCHEMA, Check
from a2d_mpi.experiments.streams import progress
from a2d_mpi.linear.features import make_feature_map
from a2d_mpi.linear.norms import make_norm
from a2d_mpi.linear.plan import LinearAttention
from a2d_mpi.masks.patterns import make_mask

LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
RESULTS = ("out", "lse", "dq", "dk", "dv")
COLUMNS = ("plan", "tokens", "forward", "wait", "backward", "wait", "sent MB", "error")
Plan = AttentionPlan | LinearAttention


def bench_linear(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all plans at all lengths; return the exit code."""
    together(comm, lambda: check_output(args.output, LINEAR_SCHEMA), on=0)
    token = 8 * args.nheads * args.headdim  # bytes of a token in float64
    # 30 arrays: copies, features, gradients.
    most = -(-max(args.seqlens) // comm.size)
    check_room(comm, f"{max(args.seqlens)} tokens (--seqlens) on one rank", 30 * token * most)
    options = {x: str(y) for x, y in vars(args).items() if x not in ("output", "command")}
    grid, rows, checks = ProcessGrid(comm, *squarest(comm.size)), [COLUMNS], {}
    measured: dict[str, dict] = {}
    tree = {**origin_of(comm), "config": options, "runs": measured}
    runs = [(name, seqlen) for seqlen in args.seqlens for name in args.plans]
    for name, seqlen in progress(runs, comm.rank, desc="plans x lengths"):
        arrays, of_run = _measured(grid, args, name, seqlen)
        checks[f"{name}, {seqlen} tokens"] = of_run
        if comm.rank == 0:
            rows.append([name, str(seqlen), *_numbers(arrays, of_run)])
        measured[f"{name}/{seqlen}"] = {
            **arrays,
            "passed": all(x.passed for x in of_run.values()),
            "checks": {x: y.attributes for x, y in of_run.items()},
        }
        if args.output:  # what there is, should the job be ended
            together(comm, lambda: write_file(args.output, LINEAR_SCHEMA, tree), on=0)
    grid.free()
    return report(comm, rows, checks)


def _measured(
    grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int
) -> tuple[dict[str, np.ndarray], dict[str, Check]]:
    """Measure one plan at one length; return its arrays on rank 0, and its checks.

    The first call is checked.
    """
    comm, seconds, wait = grid.comm, [], []
    plan = _plan(grid, args, name, seqlen)
    tensors = random_inputs(plan, True, args.seed)
    for trial in range(args.trials):
        results = _called(plan, tensors)
        seconds.append([plan.timings[f"{phase}/total"] for phase in PHASES])
        wait.append([plan.timings[f"{phase}/wait"] for phase in PHASES])
        if trial == 0:
            counted = {key: sent for key, (sent, _) in plan.traffic.bytes.items()}
            off = comm.allreduce(plan.traffic.bytes != plan.predicted_traffic())
            checks = {"traffic": Check(float(off), 0.0, comm.size)}
            if name in LINEAR:
                checks |= _check_linear(plan, tensors | results, args)
            else:
                checks |= check_attention(plan, tensors | results, SAMPLE, args.seed)
    sent = [sum(n for key, n in counted.items() if key[0] == phase) for phase in PHASES]
    gathered = comm.gather((seconds, wait, sent)) or [(seconds, wait, sent)]
    plan.free()
    seconds, wait, sent = map(np.array, zip(*gathered))
    arrays = {"seconds": seconds.swapaxes(0, 1), "wait": wait.swapaxes(0, 1), "sent": sent}
    return arrays, checks


def _numbers(arrays: Mapping[str, np.ndarray], checks: Mapping[str, Check]) -> list[str]:
    """Return the numbers of a run in the table: medians of the slowest rank, and mean waits."""
    seconds = np.median(arrays["seconds"].max(axis=1), axis=0)
    wait = np.median(arrays["wait"].mean(axis=1), axis=0)
    times = [f"{x:.3f}" for both in zip(seconds, wait) for x in both]
    sent = arrays["sent"].sum(axis=1).max() / 1e6
    return [*times, f"{sent:.3f}", f"{max(x.error for x in checks.values()):.1e}"]


def _plan(grid: ProcessGrid, args: argparse.Namespace, name: str, seqlen: int) -> Plan:
    mask, names = make_mask(args.mask, seqlen), ("nheads", "headdim", "dtype", "threads")
    sizes = {"seqlen": seqlen, **{x: getattr(args, x) for x in names}}
    if name not in LINEAR:
        return make_plan(name, grid, mask, **sizes)
    names = ("feature_map", "norm", "decay", "distribution", "seed")
    options = {x: getattr(args, x) for x in names}
    return LinearAttention(grid, mask, **sizes, **options, states=LINEAR[name])


def _called(plan: Plan, tensors: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Call each phase once; return the results.  Linear attention has its `Kept` as "lse"."""
    q, k, v, dout = (tensors[x] for x in ("q", "k", "v", "dout"))
    plan.grid.comm.Barrier()
    out, lse = plan.forward(q, k, v)
    plan.grid.comm.Barrier()
    return dict(zip(RESULTS, (out, lse, *plan.backward(dout, q, k, v, out, lse))))


def _check_linear(
    plan: LinearAttention, t: Mapping[str, object], args: argparse.Namespace
) -> dict[str, Check]:
    """Compare sampled rows with dense linear attention in float64.

    Every rank computes the contributions of its own tokens to the sampled rows.  The gradients of
    k and v depend on out of all queries, which is taken from the run.  Feature maps and
    normalisations are the plan's, in float64; tests compare them with other code.
    """
    config, comm, own = plan.config, plan.grid.comm, plan.tokens
    tokens = np.concatenate(samples(config.seqlen, SAMPLE, args.seed))
    norm = make_norm(args.norm)
    sizes = config.headdim, config.headdim, args.seed, np.dtype(np.float64)
    here = make_feature_map(args.feature_map, own, *sizes)
    there = make_feature_map(args.feature_map, tokens, *sizes)

    def turned(x: np.ndarray) -> np.ndarray:  # (H, tokens, D)
        return x.swapaxes(0, 1).astype(np.float64)

    def with_ones(v: np.ndarray) -> np.ndarray:
        return np.concatenate([v, np.ones((*v.shape[:2], norm.columns))], axis=2)

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
    shown = factors(tokens, own)  # (rows, n)
    products = comm.allreduce((fq_rows @ fk.swapaxes(1, 2) * shown) @ v)
    out, scale = norm.forward(products.swapaxes(0, 1))
    do = norm.backward(of_tokens["dout"].swapaxes(0, 1), out, scale).swapaxes(0, 1)
    dq = comm.allreduce((do @ v.swapaxes(1, 2) * shown) @ fk)
    shown = factors(own, tokens)  # (n, rows)
    do = turned(norm.backward(t["dout"].astype("f8"), t["out"].astype("f8"), t["lse"].scale))
    dk = comm.allreduce((do @ v_rows.swapaxes(1, 2) * shown).swapaxes(1, 2) @ fq)
    dv = comm.allreduce((fq @ fk_rows.swapaxes(1, 2) * shown).swapaxes(1, 2) @ do)
    exact = {
        "out": out,
        "dq": there.backward(dq, fq_rows).swapaxes(0, 1),  # (rows, H, D)
        "dk": there.backward(dk, fk_rows).swapaxes(0, 1),
        "dv": dv[..., : config.headdim].swapaxes(0, 1),
    }
    mine, bound = np.isin(tokens, own), BOUNDS[plan.dtype.name]
    rows = np.searchsorted(own, tokens[mine])
    return {name: within(bound, t[name][rows], x[mine], comm) for name, x in exact.items()}
