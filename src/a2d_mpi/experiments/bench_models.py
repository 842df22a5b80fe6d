"""The programs of `drivers/bench.py` train, decode and linear: models, checked and timed.

The files::

    /                        attributes: schema, schema_version; of decode and linear: provenance
    /config                  attributes: options of decode and linear
    /runs/<name>             of train.  Attributes: plan, model, predicted/<part>, parts, ...
        origin               attributes: provenance
        seconds              (trials, ranks, parts) seconds of steps
        operator             (trials, ranks) seconds of attention alone, forward and backward once
        activations          (ranks,) peak bytes of a step without attention's buffers
    /runs/<ranks>/<context>  of decode.  Attributes: sent_bytes and sent_messages of the rank that
                             sends most, parts
        seconds              (trials, ranks, parts) seconds of steps
    /runs/<plan>/<tokens>    of linear
        seconds              (trials, ranks, phases) seconds of calls: forward, backward
        sent                 (ranks, phases) bytes of a call

Every run has the attribute passed, and groups checks/<...> with error, bound, rows and passed.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi import Causal, LinearAttention, ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core import reference
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import squarest
from a2d_mpi.experiments import benchmark
from a2d_mpi.experiments.check import check_attention, samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output, read_file, write_file
from a2d_mpi.experiments.measure import origin_of, random_rows
from a2d_mpi.experiments.options import SAMPLE, progress
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.results import LINEAR_SCHEMA, STEPS_SCHEMA, extend_file, step_seconds
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.experiments.train_gpt import model_of
from a2d_mpi.gpt import apart
from a2d_mpi.gpt.cache import step_traffic
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import STEP_PARTS, cache_bytes, predict_step, training_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import VOCAB, Batch
from a2d_mpi.gpt.training import Training
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import candidate, duration
from a2d_mpi.planning.profile import read_machine

DECODING_SCHEMA = ("a2d_mpi decoding", 1)
DECODING_PARTS = ("attention", "merge", "other")  # of a step's seconds
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
BLOCK, UNLIMITED = 16, 1 << 30  # tokens of a block of the cache, and blocks of a rank
LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`
# Numbers of attention ranks and FFN ranks.  Without FFN ranks all are alike.
Split = tuple[int, int]
# By name in files: a plan, whether the backward pass recomputes, and predictions.
Steps = dict[str, tuple[Configuration, bool, dict]]


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure training steps by the plans that a file lacks; return the exit code."""
    prepared = comm.bcast(together(comm, lambda: _prepare(args, comm.size), on=0))
    config, todo = prepared
    if not todo:
        if comm.rank == 0:
            print(f"all runs are in {args.output} already")
        return 0
    n, what = args.seqlen, f"{config.parameters} parameters (--layers, --width), {args.seqlen}"
    nbytes = training_bytes(config, -(-n // comm.size), np.dtype(args.dtype).itemsize)
    nbytes *= 1 + args.recompute
    check_room(comm, f"{what} tokens (--seqlen): steps on one rank", nbytes)
    # The check in float64: weights, gradients, and four N x N matrices for each head.
    nbytes = 8 * (2 * config.parameters + 4 * config.nheads * n * n)
    check_room(comm, f"{what} tokens (--seqlen): arrays of the check", nbytes, 1)

    def write(runs: dict[str, object]) -> None:
        extend_file(args.output, STEPS_SCHEMA, {"runs": runs})

    columns = ("plan", "step", *STEP_PARTS, "operator", "activations", "error")
    return benchmark.measured(comm, columns, _steps(comm, args, config, todo), write)


def _prepare(args: argparse.Namespace, ranks: int) -> tuple[GPTConfig, Steps]:
    """Return sizes, and the steps that the file lacks; on one rank."""
    config = model_of(args, vocab=VOCAB, seqlen=args.seqlen)
    machine = read_machine(args.profile) if args.profile else None
    sizes = {"seqlen": args.seqlen, "dtype": args.dtype, **config.heads}
    case, todo = Case(**sizes, mask=args.mask, backward=True), {}
    there = check_output(args.output, STEPS_SCHEMA, args.resume)
    done = read_file(args.output, STEPS_SCHEMA)["runs"] if there else {}
    plans = plans_for(case, args.plans, ranks, machine=machine)
    for c, again in product(plans, (False, True)[: 1 + args.recompute]):
        name = f"{c.name}-{config.layers}x{config.width}" + "-recompute" * again
        if name not in done:
            todo[name] = c, again, _predicted(machine, c, config, again) if machine else {}
    return config, todo


def _predicted(machine: Machine, c: Configuration, config: GPTConfig, again: bool) -> dict:
    """Return the predictions of a run by their names in files."""
    plan = candidate(machine, c.method, c.layout, c.case.work())
    step = predict_step(machine, plan, config, config.seqlen, c.case.dtype, again)
    predicted = {**step.seconds, "memory": step.memory, "operator": plan.seconds}
    return {"machine": machine.name, **{f"predicted/{x}": y for x, y in predicted.items()}}


def _steps(
    comm: MPI.Intracomm, args: argparse.Namespace, config: GPTConfig, todo: Steps
) -> Iterator[benchmark.Run]:
    """Check a first step by each plan, time others in turn, and yield the runs."""
    weights = Parameters(config, initial(config, args.seed, args.dtype))
    tokens = np.random.default_rng([args.seed, 1]).integers(0, config.vocab, args.seqlen + 1)
    positions, ends = np.arange(args.seqlen), np.array([0, args.seqlen])
    batch = Batch(tokens[:-1], tokens[1:], positions, ends)
    mask = next(iter(todo.values()))[0].case.work().mask
    exact = comm.bcast(_exact_step(weights, batch, mask) if comm.rank == 0 else None)
    moments = np.zeros((2, config.parameters), args.dtype)
    # A learning rate of 0 keeps the weights, so that all plans can use the same ones.
    trainings = {x: Training(comm, weights, moments, recompute=x) for _, x, _ in todo.values()}
    plans: dict[str, AttentionPlan] = {}
    grids, tensors, times, checks, peaks = {}, {}, {}, {}, {}

    def step(name: str) -> float:
        """Measure a step, and attention alone; return the loss."""
        comm.Barrier()
        loss, parts = trainings[todo[name][1]].step(plans[name], batch, 0.0)
        _, seconds = _called(plans[name], tensors[name])
        times[name].append((loss, [*parts.values()], sum(seconds)))
        return loss

    for name, (c, again, _) in todo.items():
        plan = plans[name] = benchmark.plan_of(comm, c, grids, threads=args.threads)
        tensors[name], times[name] = benchmark.random_inputs(plan, True), []
        training = trainings[again]
        first = step(name), training.gradients.flat
        checks[name] = benchmark.check_step(first, exact, args.dtype, args.seqlen, comm)
        tracemalloc.start()
        training.loss(plan, batch, args.seqlen, training.gradients)
        _, peaks[name] = tracemalloc.get_traced_memory()  # peak bytes
        tracemalloc.stop()
    order = list(benchmark.turns(list(todo), args.trials))
    for name in progress(order, comm.rank, desc="steps"):
        step(name)
    origin = origin_of(comm)
    for name, (c, again, predicted) in todo.items():
        losses, seconds, operator = zip(*times[name])
        differ = comm.allreduce(sum(x != losses[0] for x in losses))
        checks[name]["repeat"] = Check(float(differ), 0.0, comm.size)
        own = seconds[1:], operator[1:], peaks[name]  # the first step is the warm-up
        seconds, operator, peak = (np.array(x) for x in zip(*(comm.gather(own) or [own])))
        run = {
            "origin": origin, **c.attributes, **asdict(config), "parts": list(STEP_PARTS),
            "recompute": again, "distribution": plans[name].distribution.name,
            "seconds": seconds.swapaxes(0, 1), "operator": operator.T, "activations": peak,
            **predicted,
        }  # fmt: skip
        yield name, run, _row(run, checks[name]), checks[name]
    for x in (*trainings.values(), *plans.values(), *grids.values()):
        x.free()


def _row(run: Mapping[str, Any], checks: Mapping[str, Check]) -> list[str]:
    """Return medians of the slowest rank, with predictions in parentheses, and memory."""
    cells = ["{method} {rows}x{cols}x{heads}".format(**run) + " again" * run["recompute"]]
    for name, seconds in step_seconds(run).items():
        predicted = run.get(f"predicted/{name}")
        cells.append(duration(seconds) + (f" ({duration(predicted)})" if predicted else ""))
    error = max(checks[x].error for x in ("loss", "gradients"))
    return [*cells, f"{run['activations'].max() / 1e6:.2f} MB", f"{error:.1e}"]


def _exact_step(weights: Parameters, batch: Batch, mask: Mask) -> tuple[float, np.ndarray]:
    """Compute loss and clipped gradient in float64 on this rank, with a textbook's attention."""
    config, n = weights.config, len(batch.tokens)
    dense = mask.dense(batch.positions, batch.positions), config.headdim**-0.5
    textbook = SimpleNamespace(
        tokens=batch.positions,
        forward=lambda *qkv: reference.attention(*qkv, *dense),
        backward=lambda dout, q, k, v, out, lse: reference.attention_backward(
            dout, q, k, v, lse, (dout * out).sum(axis=2), *dense
        ),
    )
    wide = Parameters(config, weights.flat.astype("f8"))
    gradients = Parameters(config, np.zeros(config.parameters))
    loss = GPT(wide, textbook).loss(batch.tokens, batch.targets, n, gradients)
    # Adam clips the gradients that are compared with these.
    return loss, gradients.flat * min(1.0, 1.0 / np.linalg.norm(gradients.flat))


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


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure decoding steps of all contexts on all numbers of ranks; return the exit code."""
    together(comm, lambda: check_output(args.output, DECODING_SCHEMA), on=0)
    config, splits = together(comm, lambda: _validated(args, comm.size))
    longest, requests = max(args.contexts), args.requests
    what = f"the cache of {requests} requests (--requests) of {longest} tokens (--contexts)"
    most = -(-requests // min(x for x, _ in splits)) * config.seqlen + BLOCK
    # The keys of a request are drawn whole, and checked in float64.
    keys = 24 * config.nheads_kv * config.headdim * longest
    nbytes = cache_bytes(config, most, 4) + 4 * config.parameters + keys
    check_room(comm, f"{config.parameters} parameters and {what} on one rank", nbytes)
    if comm.rank == 0:
        print(f"{requests} requests, {args.layers} layers; milliseconds of a step, medians")
    tree = {**origin_of(comm), "config": {
        **{x: getattr(config, x) for x in ("layers", "width", "nheads", "nheads_kv", "headdim")},
        **{x: getattr(args, x) for x in ("requests", "trials", "seed")},
    }}  # fmt: skip
    columns = ("ranks", "context", "step", *DECODING_PARTS, "sent bytes", "messages")
    runs = _decoding_runs(comm, splits, config, args)
    return benchmark.measured(comm, columns, runs, _writer(args, DECODING_SCHEMA, tree))


def _validated(args: argparse.Namespace, ranks: int) -> tuple[GPTConfig, list[Split]]:
    """Return the sizes of the model, and the numbers of ranks; refuse what does not fit."""
    numbers = args.ranks or [1 << i for i in range(ranks.bit_length())]
    splits = [*((x, 0) for x in numbers), *(args.apart or ())]
    if max(map(sum, splits)) > ranks or any(min(x) < 1 for x in args.apart or ()):
        raise ValueError(
            f"--ranks and --apart must be at most {ranks} ranks, and --apart at least 1+1, got "
            + ",".join(f"{x}+{y}" if y else f"{x}" for x, y in splits)
        )
    most = max(args.contexts) + args.trials + 1
    sizes = args.layers, args.width, args.nheads, most, args.nheads_kv
    return GPTConfig(256, *sizes, positions="rotary", headdim=args.headdim), splits


def _writer(args: argparse.Namespace, schema: tuple[str, int], tree: dict) -> Callable:
    """Return a function that writes runs and what they share, if there is an output."""
    return lambda runs: args.output and write_file(args.output, schema, {**tree, "runs": runs})


def _decoding_runs(
    comm: MPI.Intracomm, splits: list[Split], config: GPTConfig, args: argparse.Namespace
) -> Iterator[benchmark.Run]:
    """Measure a context after the other on some of the ranks; others yield empty runs."""
    for split, context in product(splits, args.contexts):
        part = comm.Split(0 if comm.rank < sum(split) else MPI.UNDEFINED, comm.rank)
        label, run, row, checks = "+".join(str(x) for x in split if x), {}, (), {}
        if part != MPI.COMM_NULL:
            run, checks = _decoded(part, split, config, args, context)
            part.Free()
            milliseconds = (f"{1e3 * x:.2f}" for x in step_seconds(run).values())
            traffic = f"{run['sent_bytes']}", f"{run['sent_messages']}"
            row = label, f"{context}", *milliseconds, *traffic
        yield f"{label}/{context}", run, row, checks


def _decoded(
    comm: MPI.Intracomm, split: Split, config: GPTConfig, args: argparse.Namespace, context: int
) -> tuple[dict[str, Any], dict[str, Check]]:
    """Check and time steps after a context of random keys and values.

    What rank 0 returns counts.
    """
    names, (ranks, ffn_ranks), steps = list(range(args.requests)), split, args.trials + 1
    rooms, weights = [UNLIMITED] * ranks, Parameters(config, initial(config, args.seed, "float32"))
    if ffn_ranks:
        grid = apart.attention_grid(comm, split, (1, ranks, 1))
        weights = Parameters(config, *apart.weights_of_rank(weights, comm.rank, split))
        decoder = apart.open_apart(comm, grid, split, weights, rooms, BLOCK)
        at = comm.rank, (ranks, 1), ffn_ranks
        predicted = apart.step_traffic_apart(config, *at, args.requests, apart.MICRO_BATCHES, 4)
    else:
        grid = ProcessGrid(comm, 1, ranks)
        decoder = Decoder(grid, weights, rooms, BLOCK)
        predicted = step_traffic(config, ranks, 1, args.requests, 4)

    def drawn(name: int, layer: int) -> np.ndarray:
        """Return random keys and values, (2, tokens, Hkv, D), of a request and layer."""
        shape = 2, context, config.nheads_kv, config.headdim
        rng = np.random.default_rng([args.seed, context, name, layer])
        return rng.standard_normal(shape, np.float32)

    for name in names:
        decoder.table.admit(name, context + steps)
        owners = np.array(decoder.table.append(name, context))
        for layer in range(config.layers) if grid else ():
            decoder.cache.put(layer, name, *drawn(name, layer)[:, owners == comm.rank])
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(config.layers - 1, names, q) if grid else None
    spent = decoder.attention.seconds if grid else dict.fromkeys(DECODING_PARTS, 0.0)
    seconds, sent_before = [], decoder.sent
    for _ in range(steps):
        before = dict(spent)
        comm.Barrier()
        start = time.perf_counter()
        decoder.step(dict.fromkeys(names, 1))
        total = time.perf_counter() - start
        attention, merge = (spent[x] - before[x] for x in DECODING_PARTS[:2])
        seconds.append([attention, merge, total - attention - merge])
    sent = [after - before for before, after in zip(sent_before, decoder.sent)]
    decoder.free()
    if grid:
        grid.free()
    off = max(abs(x - steps * y) for x, y in zip(sent, predicted))
    checks = {"traffic": Check(float(comm.allreduce(off, op=MPI.MAX)), 0.0, comm.size)}
    nbytes, messages = (comm.allreduce(x, op=MPI.MAX) // steps for x in sent)
    of_ranks = comm.gather(seconds[1:]) or [seconds[1:]]  # the first step is the warm-up
    if comm.rank == 0:  # the last request's row in the last layer
        k, v = drawn(names[-1], config.layers - 1)
        seen = np.ones((1, context), bool)
        exact, _ = reference.attention(q[-1:], k, v, seen, config.headdim**-0.5)
        checks["out"] = benchmark.within(BOUNDS["float32"], out[-1:], exact)
    run = {
        "sent_bytes": nbytes,
        "sent_messages": messages,
        "parts": list(DECODING_PARTS),
        "seconds": np.array(of_ranks).swapaxes(0, 1),
    }
    return run, checks


def bench_linear(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure linear and exact attention at all lengths; return the exit code."""
    together(comm, lambda: check_output(args.output, LINEAR_SCHEMA), on=0)
    most = -(-max(args.seqlens) // comm.size)
    # 30 arrays in float64: copies, features, gradients.
    nbytes = 30 * 8 * args.nheads * args.headdim * most
    check_room(comm, f"{max(args.seqlens)} tokens (--seqlens) on one rank", nbytes)
    grid = ProcessGrid(comm, *squarest(comm.size))
    options = {x: str(y) for x, y in vars(args).items() if x not in ("output", "command")}
    tree = {**origin_of(comm), "config": options}
    columns = ("plan", "tokens", "forward", "backward", "sent MB", "error")
    runs = _linear_runs(grid, args)
    code = benchmark.measured(comm, columns, runs, _writer(args, LINEAR_SCHEMA, tree))
    grid.free()
    return code


def _linear_runs(grid: ProcessGrid, args: argparse.Namespace) -> Iterator[benchmark.Run]:
    """Measure a plan after the other at all lengths; the last call of each is checked."""
    comm = grid.comm
    for seqlen, name in product(args.seqlens, args.plans):
        sizes = {x: getattr(args, x) for x in ("nheads", "headdim", "dtype", "threads")}
        sizes["seqlen"], seconds = seqlen, []
        if name in LINEAR:
            plan = LinearAttention(grid, Causal(), **sizes, norm="none", states=LINEAR[name])
        else:
            plan = make_plan(name, grid, Causal(), **sizes)
        tensors = benchmark.random_inputs(plan, True, args.seed)
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
    within = partial(benchmark.within, bound, comm=comm)
    return {name: within(t[name][rows], x[mine]) for name, x in exact.items()}
