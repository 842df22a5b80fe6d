"""The program of `drivers/bench.py train`: check and time training steps by several plans.

The file::

    /runs/<name>      attributes: ranks, plan, model, predicted/<part>, parts, ...
        origin        attributes: provenance
        checks/<...>  attributes: error, bound, rows, passed
        seconds       (trials, ranks, parts) seconds of steps
        operator      (trials, ranks) seconds of attention alone, forward and backward once
        activations   (ranks,) peak bytes of a step without attention's buffers
"""

from __future__ import annotations

import argparse
import tracemalloc
from dataclasses import asdict

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.benchmark import check_step, plan_of, random_inputs, report, turns
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check, attributes_of
from a2d_mpi.experiments.hdf5 import check_output, read_file
from a2d_mpi.experiments.measure import Measurement, origin_of
from a2d_mpi.experiments.model_options import model_of
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.results import STEPS_SCHEMA as SCHEMA
from a2d_mpi.experiments.results import Steps, extend_file
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import STEP_PARTS, predict_step, training_bytes
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import VOCAB, Batch
from a2d_mpi.gpt.training import Training
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import candidate, duration
from a2d_mpi.planning.profile import read_machine

COLUMNS = ("plan", "step", *STEP_PARTS, "operator", "activations", "error")


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure the plans that a file lacks; return the exit code."""
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
    batch, mask = _batch(config, args.seed), plans[0].case.work().mask
    wanted = comm.bcast(_expected(weights, batch, mask) if comm.rank == 0 else None)
    moments = np.zeros((2, config.parameters), args.dtype)
    # A learning rate of 0 keeps the weights, so that all plans can use the same ones.
    trainings = {x: Training(comm, weights, moments, recompute=x) for x in ways}
    grids: dict[Layout, ProcessGrid] = {}
    with threadpool_limits(args.threads):
        runs = {}
        for name, (c, again) in todo.items():
            plan = plan_of(comm, c, grids, threads=args.threads)
            runs[name] = _Run(c, again, plan, trainings[again], batch, wanted)
        steps = turns(list(runs.values()), args.trials)
        total = args.trials * len(runs)
        for run in progress(steps, comm.rank, desc="steps", total=total):
            run.trial()
    origin = origin_of(comm)
    measured = {name: run.result(machine, origin) for name, run in runs.items()}
    for x in (*trainings.values(), *(run.plan for run in runs.values()), *grids.values()):
        x.free()
    together(comm, lambda: extend_file(args.output, SCHEMA, {"runs": measured}), on=0)
    rows = [COLUMNS, *(_row(x) for x in measured.values() if x)]
    return report(comm, rows, {name: run.checks for name, run in runs.items()})


def _prepare(args: argparse.Namespace, ranks: int) -> tuple:
    """Return sizes, plans, machine, and the names of earlier results; on one rank."""
    config = model_of(args, vocab=VOCAB, seqlen=args.seqlen)
    machine = read_machine(args.profile) if args.profile else None
    case = Case(
        seqlen=args.seqlen, **config.heads, dtype=args.dtype, mask=args.mask, backward=True
    )
    plans = plans_for(case, args.plans, ranks, machine=machine)
    there = check_output(args.output, SCHEMA, args.resume)
    return config, plans, machine, set(read_file(args.output, SCHEMA)["runs"]) if there else set()


def _batch(config: GPTConfig, seed: int) -> Batch:
    n = config.seqlen
    tokens = np.random.default_rng([seed, 1]).integers(0, config.vocab, n + 1)
    return Batch(tokens[:-1], tokens[1:], np.arange(n), np.array([0, n]))


class _Textbook:
    """Attention by its definition, on one rank in float64."""

    def __init__(self, config: GPTConfig, mask: Mask) -> None:
        self.tokens = np.arange(config.seqlen)
        self._args = mask.dense(self.tokens, self.tokens), config.headdim**-0.5

    def forward(self, *qkv: np.ndarray) -> tuple:
        return reference.attention(*qkv, *self._args)

    def backward(self, dout, q, k, v, out, lse) -> tuple:
        delta = (dout * out).sum(axis=2)
        return reference.attention_backward(dout, q, k, v, lse, delta, *self._args)


def _expected(weights: Parameters, batch: Batch, mask: Mask) -> tuple[float, np.ndarray]:
    """Compute loss and gradient in float64 on this rank."""
    config = weights.config
    wide = Parameters(config, weights.flat.astype("f8"))
    gradients = Parameters(config, np.zeros(config.parameters))
    model = GPT(wide, _Textbook(config, mask), batch.positions)
    loss = model.loss(batch.tokens, batch.targets, len(batch.tokens), gradients)
    return loss, gradients.flat


class _Run:
    """A plan in a model: its first step is checked, and later ones are timed."""

    def __init__(
        self,
        configuration: Configuration,
        recompute: bool,
        plan: AttentionPlan,
        training: Training,
        batch: Batch,
        wanted: tuple[float, np.ndarray],
    ) -> None:
        self.configuration, self.plan, self.comm = configuration, plan, plan.grid.comm
        self.recompute, self.training, self.batch = recompute, training, batch
        self.seconds: list[list[float]] = []
        self.operator = Measurement(plan, random_inputs(plan, True), backward=True)
        self.first, self.differ = self.step(), 0  # steps whose loss was not the first step's
        # Adam has clipped the gradients: clip the expected ones in the same way.
        loss, gradient = wanted
        exact = loss, gradient * min(1.0, 1.0 / np.linalg.norm(gradient))
        case, flat = configuration.case, training.gradients.flat
        self.checks = check_step((self.first, flat), exact, case.dtype, case.seqlen, self.comm)
        tracemalloc.start()
        training.loss(plan, batch, len(batch.tokens), training.gradients)
        _, self.activations = tracemalloc.get_traced_memory()  # peak bytes
        tracemalloc.stop()
        self.operator.call()
        self.step()
        self.seconds = []

    def step(self) -> float:
        self.comm.Barrier()
        loss, parts = self.training.step(self.plan, self.batch, 0.0)
        self.seconds.append(list(parts.values()))
        return loss

    def trial(self) -> None:
        self.differ += self.step() != self.first
        self.operator.trial()

    def result(self, machine: Machine | None, origin: dict[str, object]) -> Steps | None:
        """Return attributes and arrays of all ranks on rank 0, None on others.  Collective."""
        c, config = self.configuration, self.training.weights.config
        operator = [self.operator.seconds[f"{x}/total"] for x in self.operator.phases]
        gathered = self.comm.gather({
            "seconds": self.seconds,
            "operator": np.sum(operator, axis=0),
            "activations": self.activations,
        })  # fmt: skip
        differ = float(self.comm.allreduce(self.differ))
        self.checks["repeat"] = Check(differ, 0.0, self.comm.size)
        if gathered is None:
            return None
        attributes = {
            "origin": origin, **c.attributes, **asdict(config), "parts": list(STEP_PARTS),
            "recompute": self.recompute, "distribution": self.plan.distribution.name,
            **attributes_of(self.checks),
        }  # fmt: skip
        if machine is not None:
            plan = candidate(machine, c.method, c.layout, c.case.work())
            step = predict_step(machine, plan, config, config.seqlen, c.case.dtype, self.recompute)
            attributes |= {f"predicted/{x}": y for x, y in step.seconds.items()}
            attributes |= {"predicted/memory": step.memory, "machine": machine.name}
            attributes["predicted/operator"] = plan.seconds
        arrays = {name: np.array([x[name] for x in gathered]) for name in gathered[0]}
        for name in ("seconds", "operator"):
            arrays[name] = arrays[name].swapaxes(0, 1)  # (trials, ranks, ...)
        return Steps(attributes | arrays)


def _row(run: Steps) -> list[str]:
    """Return a run's row: medians of the slowest rank, with predictions in parentheses."""
    parts = [duration(x) for x in run.parts.values()]
    if run.predicted:
        parts = [f"{x} ({duration(y)})" for x, y in zip(parts, run.predicted.values())]
    return [
        run.plan + " again" * run["recompute"],
        duration(run.seconds),
        *parts,
        duration(run.operator),
        f"{run['activations'].max() / 1e6:.2f} MB",
        f"{max(run['checks'][x]['error'] for x in ('loss', 'gradients')):.1e}",
    ]
