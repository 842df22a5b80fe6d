"""The job of drivers/bench_train.py: checks training steps by several plans, and times them.

::

    /                 attributes: schema, schema_version
    /runs/<name>      attributes: ranks, plan, model, predicted/<part>, predicted/memory, ...
        seconds       (trials, ranks, parts) of steps; attribute parts
        operator      (trials, ranks) of attention alone, forward and backward, once
        sent          (ranks, 2) bytes of a step: of attention, of sums of gradients
        activations   (ranks,) bytes at most in a step; attention's buffers are apart: buffers
"""

from __future__ import annotations

import argparse
import os
import tracemalloc
from dataclasses import asdict

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.experiments.benchmark import extends
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.gpt_files import STEPS_SCHEMA as SCHEMA
from a2d_mpi.experiments.gpt_files import Steps
from a2d_mpi.experiments.hdf5 import reading
from a2d_mpi.experiments.inputs import random_inputs
from a2d_mpi.experiments.measure import Measurement, origin_of
from a2d_mpi.experiments.model_options import model_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import new_file, set_attributes
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.experiments.timing import turns
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import PARTS, activations, predict_step, training_bytes
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Batch
from a2d_mpi.gpt.training import Training
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import candidate, duration
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import METHODS

BOUNDS = {"float32": 1e-5, "float64": 1e-10}  # of loss and gradients, relative


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure what a file lacks; returns the exit code."""
    prepared = comm.bcast(together(comm, lambda: _prepare(args, comm.size), on=0))
    config, plans, machine, done = prepared
    ways = (False, True) if args.recompute else (False,)
    model = f"-{config.layers}x{config.width}"
    named = {c.name + model + "-recompute" * x: (c, x) for c in plans for x in ways}
    todo = {x: y for x, y in named.items() if x not in done}
    if not todo:
        if comm.rank == 0:
            print(f"all of it is in {args.output} already")
        return 0
    _check_room(comm, config, args, len(todo))
    weights = Parameters(config, initial(config, args.seed, args.dtype))
    batch = _batch(config, args.seed)
    mask = plans[0].case.work().mask
    wanted = comm.bcast(_expected(weights, batch, mask) if comm.rank == 0 else None)
    with threadpool_limits(args.threads):
        runs = {
            name: _Run(comm, c, again, weights, batch, args.threads)
            for name, (c, again) in todo.items()
        }
        for run in runs.values():
            run.check(wanted, BOUNDS[args.dtype])
        for run in turns(list(runs.values()), args.trials):
            run.trial()
    origin, failed = origin_of(comm), 0
    measured = {name: run.result(machine) for name, run in runs.items()}
    for run in runs.values():
        failed += not run.passed
        run.free()
    together(comm, lambda: _write(args.output, origin, measured), on=0)
    if comm.rank == 0:
        _report(measured)
    return FAILED_CHECK if failed else 0


def _prepare(args: argparse.Namespace, ranks: int) -> tuple:
    """Sizes, plans and machine, and the names of what a file has; on one rank."""
    config = model_of(args, vocab=args.vocab, seqlen=args.seqlen)
    machine = read_machine(args.profile) if args.profile else None
    case = Case(
        seqlen=args.seqlen, **config.heads, dtype=args.dtype, mask=args.mask, backward=True
    )
    specs = [x for x in args.plans.split(",") if x.strip()]
    plans = plans_for(case, specs, ranks, tuple(METHODS), machine=machine)
    if not plans:
        raise ValueError("nothing to run: --plans is empty")
    done: set[str] = set()
    if extends(args.output, args.resume, 1 << 16):
        with reading(args.output, SCHEMA) as file:
            done = set(file["runs"])
    return config, plans, machine, done


def _check_room(
    comm: MPI.Intracomm, config: GPTConfig, args: argparse.Namespace, runs: int
) -> None:
    """Refuse sizes for which there is too little memory: of all runs, and of the reference."""
    size, n = np.dtype(args.dtype).itemsize, args.seqlen
    state = training_bytes(config, 0, size)
    step = training_bytes(config, -(-n // comm.size), size) - state
    # In float64: weights, gradients and activations of all tokens, and four N x N matrices a head.
    wide = 8 * (2 * config.parameters + n * activations(config) + 4 * config.nheads * n * n)
    what = f"{config.parameters} parameters (--layers, --width, --vocab), {n} tokens (--seqlen)"
    check_room(comm, f"{what}: {runs} plans on one rank", runs * state + step)
    check_room(comm, f"{what}: arrays of the check in float64", wide, 1)


def _batch(config: GPTConfig, seed: int) -> Batch:
    n = config.seqlen
    tokens = np.random.default_rng([seed, 1]).integers(0, config.vocab, n + 1)
    return Batch(tokens[:-1], tokens[1:], np.arange(n), np.array([0, n]))


class _Textbook:
    """Attention of one rank in float64, by its definition."""

    def __init__(self, config: GPTConfig, mask: Mask) -> None:
        self.tokens = np.arange(config.seqlen)
        self._args = mask.dense(self.tokens, self.tokens), config.headdim**-0.5

    def forward(self, *qkv: np.ndarray) -> tuple:
        return reference.attention(*qkv, *self._args)

    def backward(self, dout, q, k, v, out, lse) -> tuple:
        delta = (dout * out).sum(axis=2)
        return reference.attention_backward(dout, q, k, v, lse, delta, *self._args)


def _expected(weights: Parameters, batch: Batch, mask: Mask) -> tuple[float, np.ndarray]:
    """Loss and gradient in float64 on this rank."""
    config = weights.config
    wide = Parameters(config, weights.flat.astype("f8"))
    gradients = Parameters(config, np.zeros(config.parameters))
    model = GPT(wide, _Textbook(config, mask), batch.positions)
    loss = model.loss(batch.tokens, batch.targets, len(batch.tokens), gradients)
    return loss, gradients.flat


class _Run:
    """A plan in a model, and what was measured."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        configuration: Configuration,
        recompute: bool,
        weights: Parameters,
        batch: Batch,
        threads: int,
    ) -> None:
        self.comm, self.configuration, self.recompute = comm, configuration, recompute
        self.batch, self.seconds, self.passed = batch, [], True
        layout, work = configuration.layout, configuration.case.work()
        shape = layout.rows, layout.cols, layout.heads
        grid = ProcessGrid(comm, *shape, order=layout.order, block=layout.block)
        method = configuration.method
        self.plan = make_plan(method, grid, work.mask, **work.arguments, threads=threads)
        flat = weights.flat
        moments = np.zeros((2, len(flat)), flat.dtype)
        copy = Parameters(weights.config, flat.copy())
        self.training = Training(comm, copy, moments, 0, recompute)
        self.operator = Measurement(self.plan, random_inputs(self.plan, True), backward=True)

    def step(self) -> float:
        self.comm.Barrier()
        loss, parts = self.training.step(self.plan, self.batch, 0.0)
        self.seconds.append(list(parts.values()))
        return loss

    def check(self, wanted: tuple[float, np.ndarray], bound: float) -> None:
        """Do a first step, check it, and count what it holds and sends."""
        self.first = self.step()
        flat = self.training.gradients.flat
        # Adam has clipped them: to the norm that the wanted ones are clipped to.
        norm = np.linalg.norm(wanted[1])
        gradient = wanted[1] * min(1.0, 1.0 / norm)
        self.errors = (
            abs(self.first - wanted[0]) / abs(wanted[0]),
            float(np.linalg.norm(flat - gradient) / np.linalg.norm(gradient)),
        )
        self.passed = max(self.errors) <= bound
        self.activations = self._activations()
        self.operator.call()
        self.plan.traffic.clear()
        before = self.training.sum.nbytes
        self.step()
        attention = sum(x[0] for x in self.plan.traffic.bytes.values())
        self.sent = attention, self.training.sum.nbytes - before
        self.seconds = []

    def trial(self) -> None:
        self.passed &= self.step() == self.first
        self.operator.trial()

    def _activations(self) -> int:
        """Bytes that loss and gradients allocate at most."""
        training = self.training
        tracemalloc.start()
        training.loss(self.plan, self.batch, len(self.batch.tokens), training.gradients)
        _, largest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return largest

    def result(self, machine: Machine | None) -> tuple[dict, dict]:
        """Attributes and arrays of all ranks, on the first; collective."""
        c, config = self.configuration, self.training.weights.config
        gathered = self.comm.gather((
            self.seconds,
            self.sent,
            self.activations,
            self.plan.buffer_bytes,
            np.sum([self.operator.seconds[f"{x}/total"] for x in self.operator.phases], axis=0),
        ))  # fmt: skip
        passed = self.comm.allreduce(self.passed, MPI.LAND)
        if gathered is None:
            return {}, {}
        attributes = {
            "method": c.method, "rows": c.layout.rows, "cols": c.layout.cols,
            "heads": c.layout.heads, "order": c.layout.numbering, "picked": c.picked,
            "ranks": self.comm.size, "mask": c.case.mask, "dtype": c.case.dtype,
            "recompute": self.recompute, "passed": passed,
            "distribution": self.plan.distribution.name,
            "loss error": self.errors[0], "gradient error": self.errors[1],
            **asdict(config),
        }  # fmt: skip
        if machine is not None:
            plan = candidate(machine, c.method, c.layout, c.case.work())
            step = predict_step(machine, plan, config, config.seqlen, c.case.dtype, self.recompute)
            attributes |= {f"predicted/{x}": y for x, y in step.seconds.items()}
            attributes |= {"predicted/memory": step.memory, "machine": machine.name}
            attributes["predicted/operator"] = plan.seconds
        seconds, sent, activations, buffers, operator = map(np.array, zip(*gathered))
        arrays = {"seconds": seconds.swapaxes(0, 1), "operator": operator.T, "sent": sent}
        return attributes, {**arrays, "activations": activations, "buffers": buffers}

    def free(self) -> None:
        self.training.free()
        self.plan.free()
        self.plan.grid.free()


def _write(path: str, origin: dict, measured: dict) -> None:
    there = os.path.exists(path)
    with new_file(path, SCHEMA, extend=there) as file:
        for name, (attributes, arrays) in measured.items():
            group = file.create_group(f"runs/{name}")
            set_attributes(group, {**origin, **attributes})
            for x, y in arrays.items():
                group[x] = y


def _report(measured: dict) -> None:
    """Print the table: medians of the slowest rank; in brackets what was predicted."""
    print("plan                       step      " + "".join(f"{x:>20}" for x in PARTS)
          + "      operator  activations    error")  # fmt: skip
    for attributes, arrays in measured.values():
        run = Steps(attributes, arrays)
        shown = [duration(x) + (f" ({duration(run.predicted[name])})" if run.predicted else "")
                 for name, x in run.parts.items()]  # fmt: skip
        error = max(attributes["loss error"], attributes["gradient error"])
        plan = run.plan + " again" * attributes["recompute"]
        print(f"{plan:<26}{duration(run.seconds):>9} " + "".join(f"{x:>20}" for x in shown)
              + f"{duration(run.operator):>14}{arrays['activations'].max() / 1e6:10.2f} MB"
              + f"{error:9.1e}" + " FAILED" * (not attributes["passed"]))  # fmt: skip
