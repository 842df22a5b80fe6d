"""The program of `drivers/bench.py` linear: linear and exact attention, checked and timed.

The file::

    /                        attributes: schema, schema_version, provenance
    /config                  attributes: options
    /runs/<plan>/<tokens>    attribute passed; groups checks/<...> with error, bound, rows, passed
        seconds              (trials, ranks, phases) seconds of calls: forward, backward
        sent                 (ranks, phases) bytes of a call
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
from mpi4py import MPI

from a2d_mpi import Causal, LinearAttention, ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import squarest
from a2d_mpi.experiments import bench_parts
from a2d_mpi.experiments.check import check_attention, samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import origin_of, random_rows
from a2d_mpi.experiments.options import SAMPLE
from a2d_mpi.experiments.ranks import check_room

SCHEMA = ("a2d_mpi linear attention", 2)
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`


def bench_linear(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure linear and exact attention at all lengths; return the exit code."""
    together(comm, lambda: check_output(args.output, SCHEMA), on=0)
    most = -(-max(args.seqlens) // comm.size)
    # 30 arrays in float64: copies, features, gradients.
    nbytes = 30 * 8 * args.nheads * args.headdim * most
    check_room(comm, f"{max(args.seqlens)} tokens (--seqlens) on one rank", nbytes)
    grid = ProcessGrid(comm, *squarest(comm.size))
    options = {x: str(y) for x, y in vars(args).items() if x not in ("output", "command")}
    tree = {**origin_of(comm), "config": options}
    columns = ("plan", "tokens", "forward", "backward", "sent MB", "error")

    def write(runs: dict[str, object]) -> None:
        if args.output:
            write_file(args.output, SCHEMA, {**tree, "runs": runs})

    code = bench_parts.measured(comm, columns, _runs(grid, args), write)
    grid.free()
    return code


def _runs(grid: ProcessGrid, args: argparse.Namespace) -> Iterator[bench_parts.Run]:
    """Measure a plan after the other at all lengths; the last call of each is checked."""
    comm = grid.comm
    for seqlen, name in product(args.seqlens, args.plans):
        sizes = {x: getattr(args, x) for x in ("nheads", "headdim", "dtype", "threads")}
        sizes["seqlen"], seconds = seqlen, []
        if name in LINEAR:
            plan = LinearAttention(grid, Causal(), **sizes, norm="none", states=LINEAR[name])
        else:
            plan = make_plan(name, grid, Causal(), **sizes)
        tensors = bench_parts.random_inputs(plan, True, args.seed)
        for _ in range(args.trials):
            plan.traffic.clear()
            results, taken = _called(plan, tensors)
            seconds.append(taken)
        counted = plan.traffic.bytes
        off = comm.allreduce(counted != plan.predicted_traffic())
        checks = {"traffic": Check(float(off), 0.0, comm.size)}
        if name in LINEAR:
            checks |= _check_linear(plan, tensors | results, args.seed)
        else:
            checks |= check_attention(plan, tensors | results, SAMPLE, args.seed)
        sent = [sum(n for (x, _), (n, _) in counted.items() if x == phase) for phase in PHASES]
        plan.free()
        gathered = comm.gather((seconds, sent)) or [(seconds, sent)]
        seconds, sent = map(np.array, zip(*gathered))
        times = np.median(seconds.max(axis=0), axis=0)  # of the slowest rank
        megabytes, error = sent.sum(axis=1).max() / 1e6, max(x.error for x in checks.values())
        row = name, f"{seqlen}", *(f"{x:.3f}" for x in (*times, megabytes)), f"{error:.1e}"
        yield f"{name}/{seqlen}", {"seconds": seconds.swapaxes(0, 1), "sent": sent}, row, checks


def _called(
    plan: AttentionPlan | LinearAttention, tensors: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Run each phase once, all ranks together; return the results, and the seconds of phases."""
    dout, q, k, v = (tensors[x] for x in ("dout", "q", "k", "v"))
    plan.grid.comm.Barrier()
    out, lse = plan.forward(q, k, v)  # what linear attention keeps takes the place of lse
    plan.grid.comm.Barrier()
    results = out, lse, *plan.backward(dout, q, k, v, out, lse)
    seconds = [plan.timings[f"{phase}/total"] for phase in PHASES]
    return dict(zip(("out", "lse", "dq", "dk", "dv"), results)), seconds


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
    within = partial(bench_parts.within, bound, comm=comm)
    return {name: within(t[name][rows], x[mine]) for name, x in exact.items()}
