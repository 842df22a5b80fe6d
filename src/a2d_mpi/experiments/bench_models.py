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
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import Layout, squarest
from a2d_mpi.experiments.benchmark import (
    Run,
    check_step,
    measured,
    plan_of,
    random_inputs,
    turns,
    within,
)
from a2d_mpi.experiments.check import check_attention, samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output, read_file, write_file
from a2d_mpi.experiments.measure import origin_of, random_rows
from a2d_mpi.experiments.options import SAMPLE
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.results import LINEAR_SCHEMA, STEPS_SCHEMA, extend_file, step_seconds
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.experiments.train_gpt import model_of
from a2d_mpi.gpt.apart import (
    MICRO_BATCHES,
    attention_grid,
    open_apart,
    step_traffic_apart,
    weights_of_rank,
)
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import STEP_PARTS, cache_bytes, predict_step, training_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.steps import step_traffic
from a2d_mpi.gpt.text import VOCAB, Batch
from a2d_mpi.gpt.training import Training
from a2d_mpi.linear.plan import LinearAttention
from a2d_mpi.masks.mask import Causal, Mask
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import candidate, duration
from a2d_mpi.planning.profile import read_machine

DECODING_SCHEMA = ("a2d_mpi decoding", 1)
DECODING_PARTS = ("attention", "merge", "other")  # of a step's seconds
BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # largest errors, relative to the largest value
BLOCK, UNLIMITED = 16, 1 << 30  # tokens of a block of the cache, and blocks of a rank
LINEAR = {"lasp2": "gather", "lasp": "ring"}  # plans of linear attention, and their `states`


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure training steps by the plans that a file lacks; return the exit code."""
    prepared = comm.bcast(together(comm, lambda: _prepare(args, comm.size), on=0))
    config, plans, machine, done = prepared
    ways = (False, True) if args.recompute else (False,)
    model = f"-{config.layers}x{config.width}"
    named = {c.name + model + "-recompute" * x: (c, x) for c in plans for x in ways}
    todo = {x: y for x, y in named.items() if x not in done}
    if not todo:
        if comm.rank == 0:
            print(f"all runs are in {args.output} already")
        return 0
    n, what = args.seqlen, f"{config.parameters} parameters (--layers, --width), {args.seqlen}"
    nbytes = training_bytes(config, -(-n // comm.size), np.dtype(args.dtype).itemsize)
    check_room(comm, f"{what} tokens (--seqlen): steps on one rank", len(ways) * nbytes)
    # The check in float64: weights, gradients, and four N x N matrices for each head.
    nbytes = 8 * (2 * config.parameters + 4 * config.nheads * n * n)
    check_room(comm, f"{what} tokens (--seqlen): arrays of the check", nbytes, 1)
    weights = Parameters(config, initial(config, args.seed, args.dtype))
    tokens = np.random.default_rng([args.seed, 1]).integers(0, config.vocab, n + 1)
    batch = Batch(tokens[:-1], tokens[1:], np.arange(n), np.array([0, n]))
    mask = plans[0].case.work().mask
    exact = comm.bcast(_exact_step(weights, batch, mask) if comm.rank == 0 else None)
    moments = np.zeros((2, config.parameters), args.dtype)
    # A learning rate of 0 keeps the weights, so that all plans can use the same ones.
    trainings = {x: Training(comm, weights, moments, recompute=x) for x in ways}
    grids: dict[Layout, ProcessGrid] = {}
    with threadpool_limits(args.threads):
        runs = {}
        for name, (c, again) in todo.items():
            plan = plan_of(comm, c, grids, threads=args.threads)
            runs[name] = _TimedSteps(c, again, plan, trainings[again], batch, exact)
        steps, total = turns(list(runs.values()), args.trials), args.trials * len(runs)
        for run in progress(steps, comm.rank, desc="steps", total=total):
            run.trial()
    origin = origin_of(comm)
    results = ((name, *run.result(machine, origin)) for name, run in runs.items())
    columns = ("plan", "step", *STEP_PARTS, "operator", "activations", "error")
    code = measured(
        comm, columns, results, lambda x: extend_file(args.output, STEPS_SCHEMA, {"runs": x})
    )
    for x in (*trainings.values(), *(run.plan for run in runs.values()), *grids.values()):
        x.free()
    return code


def _prepare(args: argparse.Namespace, ranks: int) -> tuple:
    """Return sizes, plans, machine, and the names of earlier results; on one rank."""
    config = model_of(args, vocab=VOCAB, seqlen=args.seqlen)
    machine = read_machine(args.profile) if args.profile else None
    case = Case(
        seqlen=args.seqlen, **config.heads, dtype=args.dtype, mask=args.mask, backward=True
    )
    plans, done = plans_for(case, args.plans, ranks, machine=machine), set()
    if check_output(args.output, STEPS_SCHEMA, args.resume):
        done = set(read_file(args.output, STEPS_SCHEMA)["runs"])
    return config, plans, machine, done


def _exact_step(weights: Parameters, batch: Batch, mask: Mask) -> tuple[float, np.ndarray]:
    """Compute loss and clipped gradient in float64 on this rank, with a textbook's attention."""
    config, n = weights.config, len(batch.tokens)
    seen, scale = mask.dense(batch.positions, batch.positions), config.headdim**-0.5

    def backward(
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
    ) -> tuple:
        delta = (dout * out).sum(axis=2)
        return reference.attention_backward(dout, q, k, v, lse, delta, seen, scale)

    textbook = SimpleNamespace(
        tokens=batch.positions,
        forward=lambda *qkv: reference.attention(*qkv, seen, scale),
        backward=backward,
    )
    wide = Parameters(config, weights.flat.astype("f8"))
    gradients = Parameters(config, np.zeros(config.parameters))
    loss = GPT(wide, textbook).loss(batch.tokens, batch.targets, n, gradients)
    # Adam clips the gradients that are compared with these.
    return loss, gradients.flat * min(1.0, 1.0 / np.linalg.norm(gradients.flat))


class _TimedSteps:
    """Steps of a model by one plan: the first one is checked, and later ones are timed."""

    def __init__(
        self,
        configuration: Configuration,
        recompute: bool,
        plan: AttentionPlan,
        training: Training,
        batch: Batch,
        exact: tuple[float, np.ndarray],
    ) -> None:
        self._configuration, self._recompute, self.plan = configuration, recompute, plan
        self._training, self._batch = training, batch
        self._tensors = random_inputs(plan, True)
        self._losses: list[float] = []
        self._seconds: list[tuple[list[float], float]] = []  # of a step, and of attention alone
        self.trial()
        case, first = configuration.case, (self._losses[0], training.gradients.flat)
        self._checks = check_step(first, exact, case.dtype, case.seqlen, plan.grid.comm)
        tracemalloc.start()
        training.loss(plan, batch, len(batch.tokens), training.gradients)
        _, self._activations = tracemalloc.get_traced_memory()  # peak bytes
        tracemalloc.stop()

    def trial(self) -> None:
        self.plan.grid.comm.Barrier()
        loss, parts = self._training.step(self.plan, self._batch, 0.0)
        self._losses.append(loss)
        _, seconds = _called(self.plan, self._tensors)
        self._seconds.append(([*parts.values()], sum(seconds)))

    def result(self, machine: Machine | None, origin: dict[str, object]) -> tuple:
        """Return the run, its row and its checks on rank 0.  Collective."""
        c, config, comm = self._configuration, self._training.weights.config, self.plan.grid.comm
        differ = comm.allreduce(sum(x != self._losses[0] for x in self._losses))
        checks = self._checks | {"repeat": Check(float(differ), 0.0, comm.size)}
        gathered = comm.gather((*zip(*self._seconds[1:]), self._activations))
        if gathered is None:
            return {}, (), {}
        seconds, operator, peaks = (np.array(x) for x in zip(*gathered))  # (ranks, trials, ...)
        run = {
            "origin": origin, **c.attributes, **asdict(config), "parts": list(STEP_PARTS),
            "recompute": self._recompute, "distribution": self.plan.distribution.name,
            "seconds": seconds.swapaxes(0, 1), "operator": operator.T, "activations": peaks,
        }  # fmt: skip
        if machine is not None:
            plan = candidate(machine, c.method, c.layout, c.case.work())
            step = predict_step(
                machine, plan, config, config.seqlen, c.case.dtype, self._recompute
            )
            run |= {f"predicted/{x}": y for x, y in step.seconds.items()}
            run |= {"predicted/memory": step.memory, "predicted/operator": plan.seconds}
            run["machine"] = machine.name
        cells = [f"{c.method} {c.layout.shape}" + " again" * self._recompute]
        for name, x in step_seconds(run).items():  # in parentheses: the prediction
            predicted = run.get(f"predicted/{name}")
            cells.append(duration(x) + (f" ({duration(predicted)})" if predicted else ""))
        error = max(checks[x].error for x in ("loss", "gradients"))
        return run, [*cells, f"{peaks.max() / 1e6:.2f} MB", f"{error:.1e}"], checks


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
    config = together(comm, lambda: _validated(comm, args))
    what = f"{args.requests} requests (--requests) of {max(args.contexts)} tokens (--contexts)"
    most = -(-args.requests // min(args.ranks)) * (max(args.contexts) + args.trials + 1) + BLOCK
    # The keys of a request are drawn whole, and checked in float64.
    keys = 24 * config.nheads_kv * config.headdim * max(args.contexts)
    nbytes = cache_bytes(config, most, 4) + 4 * config.parameters + keys
    check_room(comm, f"{config.parameters} parameters and the cache of {what} on one rank", nbytes)
    if comm.rank == 0:
        print(f"{args.requests} requests, {args.layers} layers; milliseconds of a step, medians")
    names = ("layers", "width", "nheads", "nheads_kv", "headdim", "requests", "trials", "seed")
    tree = {**origin_of(comm), "config": {x: getattr(args, x) for x in names}}
    columns = ("ranks", "context", "step", *DECODING_PARTS, "sent bytes", "messages")
    runs = _decoding_runs(comm, config, args)
    return measured(comm, columns, runs, lambda x: _write(args, DECODING_SCHEMA, tree, x))


def _write(args: argparse.Namespace, schema: tuple[str, int], tree: dict, runs: dict) -> None:
    """Write a file of runs with the same origin, if there is an output."""
    if args.output:
        write_file(args.output, schema, {**tree, "runs": runs})


def _decoding_runs(
    comm: MPI.Intracomm, config: GPTConfig, args: argparse.Namespace
) -> Iterator[Run]:
    """Measure a context after the other on some of the ranks; others yield empty runs."""
    # Numbers of attention ranks and FFN ranks.  Without FFN ranks all are alike.
    splits = [*((x, 0) for x in args.ranks), *(args.apart or ())]
    for split, context in product(splits, args.contexts):
        part = comm.Split(0 if comm.rank < sum(split) else MPI.UNDEFINED, comm.rank)
        label, run, row, checks = "+".join(str(x) for x in split if x), {}, (), {}
        if part != MPI.COMM_NULL:
            with threadpool_limits(args.threads):
                run, checks = _decoded(part, split, config, args, context)
            part.Free()
            seconds = 1e3 * run["seconds"]  # (trials, ranks, parts)
            step = np.median(seconds.sum(axis=2).max(axis=1))
            numbers = (f"{x:.2f}" for x in (step, *np.median(seconds.mean(axis=1), axis=0)))
            traffic = f"{run['sent_bytes']}", f"{run['sent_messages']}"
            row = label, f"{context}", *numbers, *traffic
        yield f"{label}/{context}", run, row, checks


def _decoded(
    comm: MPI.Intracomm,
    split: tuple[int, int],
    config: GPTConfig,
    args: argparse.Namespace,
    context: int,
) -> tuple[dict[str, object], dict[str, Check]]:
    """Check and time steps after a context of random keys and values.

    What rank 0 returns counts.
    """
    names, (ranks, ffn_ranks) = list(range(args.requests)), split
    rooms = [UNLIMITED] * ranks
    grid = attention_grid(comm, split, (1, ranks, 1)) if ffn_ranks else ProcessGrid(comm, 1, ranks)
    weights = Parameters(config, initial(config, args.seed, "float32"))
    if ffn_ranks:
        weights = Parameters(config, *weights_of_rank(weights, comm.rank, split))
        decoder = open_apart(comm, grid, split, weights, rooms, BLOCK)
        at = comm.rank, (ranks, 1), ffn_ranks
        predicted = step_traffic_apart(config, *at, args.requests, MICRO_BATCHES, 4)
    else:
        decoder = Decoder(grid, weights, rooms, BLOCK)
        predicted = step_traffic(config, ranks, 1, args.requests, 4)

    def drawn(name: int, layer: int) -> np.ndarray:
        """Return random keys and values, (2, tokens, Hkv, D), of a request and layer."""
        shape = 2, context, config.nheads_kv, config.headdim
        rng = np.random.default_rng([args.seed, context, name, layer])
        return rng.standard_normal(shape, np.float32)

    for name in names:
        decoder.table.admit(name, context + args.trials + 1)
        owners = np.array(decoder.table.append(name, context))
        for layer in range(config.layers) if grid else ():
            decoder.cache.put(layer, name, *drawn(name, layer)[:, owners == comm.rank])
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(config.layers - 1, names, q) if grid else None
    spent = decoder.attention.seconds if grid else dict.fromkeys(DECODING_PARTS, 0.0)
    seconds, sent = [], set()
    for _ in range(args.trials + 1):
        before, counted = dict(spent), decoder.sent
        comm.Barrier()
        start = time.perf_counter()
        decoder.step(dict.fromkeys(names, 1))
        total = time.perf_counter() - start
        attention, merge = (spent[x] - before[x] for x in DECODING_PARTS[:2])
        seconds.append([attention, merge, total - attention - merge])
        sent.add(tuple(b - a for a, b in zip(counted, decoder.sent)))
    decoder.free()
    if grid:
        grid.free()
    off = max(abs(a - b) for x in sent for a, b in zip(x, predicted))
    checks = {"traffic": Check(float(comm.allreduce(off, op=MPI.MAX)), 0.0, comm.size)}
    nbytes, messages = (comm.allreduce(x, op=MPI.MAX) for x in max(sent))
    of_ranks = comm.gather(seconds[1:]) or [seconds[1:]]  # the first step is the warm-up
    if comm.rank == 0:  # the last request's row in the last layer
        k, v = drawn(names[-1], config.layers - 1)
        seen = np.ones((1, context), bool)
        exact, _ = reference.attention(q[-1:], k, v, seen, config.headdim**-0.5)
        checks["out"] = within(BOUNDS["float32"], out[-1:], exact)
    run = {
        "sent_bytes": nbytes,
        "sent_messages": messages,
        "parts": list(DECODING_PARTS),
        "seconds": np.array(of_ranks).swapaxes(0, 1),
    }
    return run, checks


def _validated(comm: MPI.Intracomm, args: argparse.Namespace) -> GPTConfig:
    """Refuse options that do not fit, and choose the default number of ranks and headdim."""
    if args.ranks is None:
        args.ranks = [1 << i for i in range(comm.size.bit_length())]
    if max(args.ranks) > comm.size:
        raise ValueError(f"--ranks must be at most {comm.size}, got {args.ranks}")
    for x in args.apart or ():
        if min(x) < 1 or sum(x) > comm.size:
            raise ValueError(
                f"--apart must be at least 1+1 ranks and at most {comm.size} together, "
                f"got {x[0]}+{x[1]}"
            )
    if comm.rank == 0:
        check_output(args.output, DECODING_SCHEMA)
    most = max(args.contexts) + args.trials + 1
    sizes = args.layers, args.width, args.nheads, most, args.nheads_kv
    config = GPTConfig(256, *sizes, positions="rotary", headdim=args.headdim)
    args.headdim = config.headdim
    return config


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
    code = measured(comm, columns, runs, lambda x: _write(args, LINEAR_SCHEMA, tree, x))
    grid.free()
    return code


def _linear_runs(grid: ProcessGrid, args: argparse.Namespace) -> Iterator[Run]:
    """Measure a plan after the other at all lengths; the last call of each is checked."""
    comm = grid.comm
    for seqlen, name in product(args.seqlens, args.plans):
        sizes = {x: getattr(args, x) for x in ("nheads", "headdim", "dtype", "threads")}
        sizes["seqlen"], seconds = seqlen, []
        if name in LINEAR:
            plan = LinearAttention(grid, Causal(), **sizes, norm="none", states=LINEAR[name])
        else:
            plan = make_plan(name, grid, Causal(), **sizes)
        tensors = random_inputs(plan, True, args.seed)
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
    return {name: within(bound, t[name][rows], x[mine], comm) for name, x in exact.items()}
