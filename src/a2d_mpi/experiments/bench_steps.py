"""The programs of `drivers/bench.py` train and decode: steps of models of transformers.

The files::

    /settings      attributes: options that all runs share
    /runs/<name>   attributes: of train plan, sizes, parts; of decode ranks, context, sent_bytes
        seconds    of train (trials, ranks, parts), see `PARTS`; of decode (trials,), of a token
        sent       of train (ranks,), bytes of a step's attention
        alone      of decode (trials,), seconds of a token by one process
        origin     attributes: provenance
        checks     for each check the attributes error, bound, rows and passed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import squarest
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments import benchmark
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.measure import open_device, origin_of
from a2d_mpi.experiments.models import open_model
from a2d_mpi.experiments.options import FAILED_CHECK, progress
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.results import (
    DECODING_SCHEMA,
    STEPS_SCHEMA,
    done_before,
    extend_file,
    step_seconds,
)
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.experiments.text import Text
from a2d_mpi.experiments.train import PARTS, Trainer, check_rooms
from a2d_mpi.planning.planner import duration
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.decoding import GATHERED

BOUNDS = {"float32": 1e-4, "float64": 1e-10}  # errors of logits, relative to the largest logit
WARMUP = 2  # tokens that are not timed
DRAWN = 1 << 16  # random tokens; longer sequences repeat them
# Options of drivers/train.py.  A rate of 0 keeps the weights, so that each step repeats the first.
FIXED = {"accumulate": 1, "rate": 0.0, "warmup": 1, "steps": 1, "clip": 1.0, "separator": b"",
         "validate": 0.0, "check": "first", "folder": None, "output": None, "resume": False}  # fmt: skip


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure training steps by the plans that a file lacks; return the exit code."""
    device = open_device(comm, args.device)

    def missing(done: dict[str, bool]) -> list[list[Configuration]]:
        machine, blocks = read_machine(args.profile) if args.profile else None, []
        for n in args.seqlens:
            sizes = _trainer(args, device, n).workload().arguments
            case = Case(**sizes, mask="causal", backward=True)
            plans = plans_for(case, args.plans, comm.size, machine=machine)
            blocks.append([x for x in plans if x.name not in done])
        return blocks

    def runs(blocks: list[list[Configuration]]) -> Iterator[benchmark.Run]:
        for block in filter(None, blocks):
            yield from _training_runs(comm, args, device, block)

    for n in args.seqlens:
        check_rooms(comm, together(comm, lambda x=n: _trainer(args, device, x)))
    columns = ("plan", "tokens", "step", *PARTS, "error")
    return _measured(comm, args, STEPS_SCHEMA, columns, missing, runs)


def _measured(
    comm: MPI.Intracomm,
    args: argparse.Namespace,
    schema: tuple[str, int],
    columns: Sequence[str],
    missing: Callable[[dict[str, bool]], list],
    runs: Callable[[list], Iterator[benchmark.Run]],
) -> int:
    """Make the runs that the file lacks, write and report them; return the exit code."""
    others = ("command", "output", "resume", "plans", "seqlens", "contexts", "ranks", "profile")
    settings = {x: str(y) for x, y in vars(args).items() if x not in others}

    def prepare() -> tuple[dict[str, bool], list]:
        done = done_before(args.output, schema, args.resume, settings)
        return done, missing(done)

    def write(made: dict[str, dict]) -> None:
        extend_file(args.output, schema, {"settings": settings, "runs": made})

    done, todo = comm.bcast(together(comm, prepare, on=0))
    if comm.rank == 0 and done:
        print(f"{len(done)} runs are in {args.output} already")
    code = benchmark.measured(comm, columns, runs(todo), write)
    return code if all(done.values()) else FAILED_CHECK


def _trainer(
    args: argparse.Namespace, device: Device, seqlen: int, method: str = "attention2d"
) -> Trainer:
    """Make a training whose steps all have the same random tokens.  Local."""
    torch.set_num_threads(args.threads)
    dtype = "float32" if args.dtype == "bfloat16" else args.dtype
    model, tokenizer = open_model(args.model, dtype, args.seed)
    text = Text([_tokens(model, args.seed, min(seqlen, DRAWN)).numpy()], separated=False)
    text.batch = lambda *_: text.at(0, seqlen)
    given = argparse.Namespace(**vars(args) | FIXED | {"seqlen": seqlen, "method": method})
    return Trainer(given, device, model.train(), tokenizer, text, None, "")


def _tokens(model: torch.nn.Module, seed: int, *shape: int) -> torch.Tensor:
    """Draw tokens."""
    rng, most = np.random.default_rng([seed, 1]), model.get_input_embeddings().num_embeddings
    return torch.from_numpy(rng.integers(most, size=shape))


def _training_runs(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, block: list[Configuration]
) -> Iterator[benchmark.Run]:
    """Check a first step by each plan, time others in turn, and yield the runs."""
    trainers, grids = {}, [ProcessGrid.from_layout(comm, c.layout) for c in block]
    for c, grid in zip(block, grids):
        trainers[c] = x = _trainer(args, device, c.case.seqlen, c.method)
        x.begin(comm, grid)
        x.step()  # compared with one process
    order = [*benchmark.turns(block, args.trials)]
    for c in progress(order, comm.rank, desc=f"steps of {block[0].case.seqlen} tokens"):
        comm.Barrier()
        trainers[c].step()
    origin = origin_of(comm, device)
    for c, x in trainers.items():
        differ = comm.allreduce(len(set(x.state.losses)) - 1)
        checks = x.checks | {"repeat": Check(float(differ), 0.0, comm.size)}
        own = x.state.seconds[1:], sum(x.sent.values())
        seconds, sent = zip(*(comm.gather(own) or [own]))
        run = {"origin": origin, **c.attributes, "parts": list(PARTS), "sent": np.array(sent)}
        run["seconds"] = np.array(seconds).swapaxes(0, 1)
        step, *parts = step_seconds(run).values()
        row = [f"{c.method} {c.layout.shape}" + " (picked)" * c.picked, f"{c.case.seqlen}"]
        row += [duration(step), *(f"{duration(y)} ({100 * y / step:.0f} %)" for y in parts)]
        yield c.name, run, [*row, f"{max(y.error for y in checks.values()):.1e}"], checks
        x.free()
    for grid in grids:
        grid.free()


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure the decoded tokens that a file lacks, by ranks and context; return the exit code."""
    torch.set_num_threads(args.threads)
    numbers = args.ranks or [1 << i for i in range(comm.size.bit_length())]
    times: dict[int, np.ndarray] = {}  # of one process, by context

    def opened() -> torch.nn.Module:
        if max(numbers) > comm.size:
            raise ValueError(f"--ranks must be at most {comm.size}, got {max(numbers)}")
        return open_model(args.model, args.dtype, args.seed)[0]

    def missing(done: dict[str, bool]) -> list[tuple[int, int]]:
        return [x for x in product(numbers, args.contexts) if "{}-{}".format(*x) not in done]

    def runs(todo: list[tuple[int, int]]) -> Iterator[benchmark.Run]:
        for ranks, context in todo:
            part, run = comm.Split(MPI.UNDEFINED if comm.rank >= ranks else 0), ({}, (), {})
            if part != MPI.COMM_NULL:
                run = _decoded(part, args, model, context, times)
                part.Free()
            yield f"{ranks}-{context}", *run

    model = together(comm, opened)
    config, size = model.config.get_text_config(), model.num_parameters()
    row = 24 * config.num_hidden_layers * config.hidden_size + config.vocab_size
    most = args.requests * max(args.contexts)
    what = f"{size} parameters and {most} tokens (--requests, --contexts) of one process"
    check_room(comm, what, 8 * (4 * size + most * row), 1)
    columns = ("ranks", "context", "token", "alone", "tokens/s", "sent bytes", "error")
    return _measured(comm, args, DECODING_SCHEMA, columns, missing, runs)


def _decoded(
    comm: MPI.Intracomm,
    args: argparse.Namespace,
    model: torch.nn.Module,
    context: int,
    times: dict[int, np.ndarray],
) -> tuple[dict[str, Any], Sequence[str], dict[str, Check]]:
    """Generate tokens by these ranks and by one process; what rank 0 returns counts."""
    ids, n = _tokens(model, args.seed, args.requests, context), args.trials + WARMUP
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "min_new_tokens": n}
    options |= {"do_sample": False, "pad_token_id": 0}
    grid, clock, checks = ProcessGrid(comm, *squarest(comm.size)), _Clock(), {}
    cp = ContextParallel(grid, deepcopy(model), seqlen=context, threads=args.threads)
    cache = cp.prefill(ids, options["attention_mask"])
    cp.decoding_traffic.clear()
    more = {"past_key_values": cache, "output_logits": True, "return_dict_in_generate": True}
    found = cp.generate(ids, streamer=clock, **more, **options)
    sent, formula = sum(x for x, _ in cp.decoding_traffic.bytes.values()), _sent(cp, args.requests)
    checks["traffic"] = Check(float(comm.allreduce(abs(sent - n * formula))), 0.0, comm.size)

    def alone() -> None:
        """Compare with one process in float64, and time one process."""
        wide, tokens = deepcopy(model).double(), found.sequences[:, :-1]
        with torch.no_grad():
            exact = wide(tokens, logits_to_keep=n).logits.flatten(0, 1)  # (B n, V)
        logits = torch.stack(found.logits, 1).flatten(0, 1)
        checks["logits"] = benchmark.within(BOUNDS[args.dtype], logits.numpy(), exact.numpy())
        if context not in times:
            one = _Clock()
            model.generate(ids, streamer=one, **options)
            times[context] = one.seconds

    together(comm, alone, on=0)
    origin = origin_of(comm)
    cp.free()
    grid.free()
    if comm.rank != 0:
        return {}, (), {}
    run = {"origin": origin, "ranks": comm.size, "context": context, "sent_bytes": formula}
    run |= {"seconds": clock.seconds, "alone": times[context]}
    token, of_one = np.median(clock.seconds), np.median(times[context])
    row = [f"{comm.size}", f"{context}", duration(token), duration(of_one)]
    row += [f"{args.requests / token:.3g}", f"{formula}", f"{checks['logits'].error:.1e}"]
    return run, row, checks


class _Clock(list):
    """A streamer of `generate` that notes when tokens come."""

    def put(self, _: torch.Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; `generate` calls it."""

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of each token but the first ones."""
        return np.diff(self)[WARMUP:]


def _sent(cp: ContextParallel, rows: int) -> int:
    """Return the bytes that this rank sends in a step with any context.

    P ranks merge out and lse of rows of H heads of D elements, in L layers.  In two exchanges a
    rank sends L (P - 1) ceil(rows H / P) (2 D + 1) elements, and in one exchange
    L (P - 1) rows H (D + 1).  Rank 0 sends two integers for each row.
    """
    ranks, nbytes = cp.grid.comm.size, 16 * rows * (cp.grid.comm.rank == 0)
    near = len(set(cp.grid.layout.nodes or range(ranks))) == 1
    for kind in cp.layers.values():
        heads, size = rows * kind.nheads, max(4, np.dtype(kind.dtype).itemsize)
        whole, share = heads * (kind.headdim_v + 1), -(-heads // ranks)
        in_one = ranks == 2 or (near and ranks * whole * size <= GATHERED)
        nbytes += size * (whole if in_one else share * (2 * kind.headdim_v + 1))
    return (ranks - 1) * nbytes
